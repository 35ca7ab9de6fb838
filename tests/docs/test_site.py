"""What `make docs` would refuse, found without building the site; and the build itself, which refuses a dead link."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.browser import browser_page
from tests.support.helpers import ROOT

REFERENCE = runpy.run_path(str(ROOT / "docs" / "extensions" / "public_names.py"))
OURS = REFERENCE["public_names"]("toolkit")


def contents() -> list[str]:
    listed: dict[str, list[str]] = runpy.run_path(str(ROOT / "docs" / "conf.py"))["CONTENTS"]
    return [page for pages in listed.values() for page in pages]


def pages() -> set[str]:
    """Return the user pages of the repository without the first one, which holds the table of contents."""
    command = ["git", "ls-files", "docs/*.md", "recipes/*.md"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    developers = ("docs/start/migration/", "docs/start/tour", "docs/project/notes/", "docs/project/upstream/")
    return {path.rpartition(".")[0] for path in listed if not path.startswith(developers)}


def test_contents_list_every_user_page_once():
    assert sorted(contents()) == sorted(pages())


def test_every_public_name_has_a_docstring():
    assert [public.home for public in OURS if not public.doc] == []


def test_the_pages_of_toolkit_and_its_experts_list_every_name_of_theirs(tmp_path: Path):
    import toolkit

    REFERENCE["write_pages"]("toolkit", tmp_path / "api")
    for package in (toolkit, toolkit.experts):
        text = (tmp_path / "api" / f"{package.__name__}.rst").read_text()
        shown = set(re.findall(rf"\{{py:obj\}}`{package.__name__}\.(\w+) <", text))
        modules = {name for name in package.__all__ if type(getattr(package, name)) is type(sys)}
        assert shown == {name for name in package.__all__ if not name.startswith("__")} - modules


def sphinx(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """The command of `make docs`, into other folders."""
    flags = ["--fail-on-warning", "--keep-going", "--quiet"]
    return subprocess.run(
        [sys.executable, "-m", "sphinx", *flags, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "docs" / "extensions")},
        capture_output=True,
        text=True,
        timeout=600,
    )


LINKS = {
    "a page": ("[x](other.md)", "[x](gone.md)"),
    "a heading": ("[x](other.md#a-heading)", "[x](other.md#no-heading)"),
    "a file": ("[x](code.py)", "[x](gone.py)"),
    "a picture": ("![x](picture.png)", "![x](gone.png)"),
}


@pytest.mark.parametrize("is_there", [True, False])
def test_a_dead_link_fails_the_build(is_there: bool, tmp_path: Path):
    (tmp_path / "index.md").write_text(
        "# First\n\n```{toctree}\nother\n```\n\n" + "\n\n".join(pair[not is_there] for pair in LINKS.values()) + "\n"
    )
    (tmp_path / "other.md").write_text("# Other\n\n## A heading\n")
    (tmp_path / "code.py").write_text("print()\n")
    (tmp_path / "picture.png").write_bytes((ROOT / "docs" / "images" / "report_curves.png").read_bytes())
    settings = ["--isolated", "-D", "extensions=myst_parser,source_pages", "-D", "myst_heading_anchors=4"]
    done = sphinx(*settings, tmp_path, tmp_path / "built")
    assert done.returncode == (0 if is_there else 1), done.stderr
    for name in [] if is_there else ["gone.md", "no-heading", "gone.py", "gone.png"]:
        assert name in done.stderr
    assert (tmp_path / "built" / "source" / "code.py.html").exists() == is_there


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two pages of it, as all have the same frame. `make check` reads all and follows their links."""
    folder = tmp_path_factory.mktemp("pages")
    places = ["--conf-dir", ROOT / "docs", "--doctree-dir", folder / "doctrees", ROOT, folder / "site"]
    sphinx("-D", "include_patterns=README.md,docs/start/quickstart.md", *places)  # which warns of links to the others
    return folder / "site"


def test_the_site_loads_nothing_from_elsewhere(site: Path):
    built = list(site.rglob("*.html"))
    assert site / "docs" / "start" / "quickstart.html" in built
    for file in built:
        loaded = re.findall(r"<(?:script|link|img|iframe|source)\b[^>]*?(?:https?:)?//[^>]*>", file.read_text())
        assert loaded == [], file


@pytest.mark.browser
def test_search_of_local_files_shows_excerpts(site: Path):
    with browser_page() as (page, console):
        page.goto(f"{(site / 'search.html').as_uri()}?q=interruption")
        excerpt = page.locator("#search-results .context").first.text_content()
    assert "the same command again after an interruption" in (excerpt or "")
    assert console == []
