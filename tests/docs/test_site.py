"""Contents, API pages, links and search of the documentation site."""

import csv
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import toolkit
from benchmarks.support.processes import ROOT
from tests.support.browser import browser_page

REFERENCE = runpy.run_path(str(ROOT / "docs" / "extensions" / "public_names.py"))


def test_contents_list_every_user_page_once():
    contents: dict[str, list[str]] = runpy.run_path(str(ROOT / "docs" / "conf.py"))["CONTENTS"]
    command = ["git", "ls-files", "docs/*.md", "recipes/*.md"]
    files = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    developers = ("docs/start/tour", "docs/project/notes/", "docs/project/upstream/")
    pages = {path.rpartition(".")[0] for path in files if not path.startswith(developers)}
    assert sorted(page for part in contents.values() for page in part) == sorted(pages)


def test_every_page_is_linked_from_readme():
    seen, pages = set(), [ROOT / "README.md"]
    while pages:
        page = pages.pop()
        seen.add(page)
        links = re.findall(r"\]\(([\w./-]+\.md)(?:#[\w-]*)?\)", page.read_text())
        pages += {(page.parent / link).resolve() for link in links} - seen
    assert {page for page in (ROOT / "docs").rglob("*.md") if "notes" not in page.parts} - seen == set()


def test_public_names_have_docstrings():
    assert [public.home for public in REFERENCE["public_names"]("toolkit") if not public.doc] == []


def test_api_pages_list_every_public_name(tmp_path: Path):
    REFERENCE["write_pages"]("toolkit", tmp_path / "api")
    for package in (toolkit, toolkit.experts):
        text = (tmp_path / "api" / f"{package.__name__}.rst").read_text()
        shown = set(re.findall(rf"\{{py:obj\}}`{package.__name__}\.(\w+) <", text))
        modules = {name for name in package.__all__ if type(getattr(package, name)) is type(sys)}
        assert shown == {name for name in package.__all__ if not name.startswith("__")} - modules


def sphinx(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Build pages with the flags of `make docs`."""
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "docs" / "extensions")}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


VALID_LINKS = "[x](other.md)\n\n[x](other.md#a-heading)\n\n[x](code.py)\n\n![x](picture.png)\n"
DEAD_LINKS = "[x](gone.md)\n\n[x](other.md#no-heading)\n\n[x](gone.py)\n\n![x](gone.png)\n"


@pytest.mark.parametrize("links", [VALID_LINKS, DEAD_LINKS], ids=["valid", "dead"])
def test_dead_link_fails_the_build(links: str, tmp_path: Path):
    (tmp_path / "index.md").write_text(f"# First\n\n```{{toctree}}\nother\n```\n\n{links}")
    (tmp_path / "other.md").write_text("# Other\n\n## A heading\n")
    (tmp_path / "code.py").write_text("print()\n")
    (tmp_path / "picture.png").write_bytes((ROOT / "docs" / "images" / "report_curves.png").read_bytes())
    settings = ["--isolated", "-D", "extensions=myst_parser,source_pages", "-D", "myst_heading_anchors=4"]
    done = sphinx(*settings, tmp_path, tmp_path / "built")
    assert done.returncode == (links is DEAD_LINKS), done.stderr
    for name in ["gone.md", "no-heading", "gone.py", "gone.png"] if links is DEAD_LINKS else []:
        assert name in done.stderr
    assert (tmp_path / "built" / "source" / "code.py.html").exists() == (links is VALID_LINKS)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site with two pages, which share the template of all pages."""
    folder = tmp_path_factory.mktemp("pages")
    places = ["--conf-dir", ROOT / "docs", "--doctree-dir", folder / "doctrees", ROOT, folder / "site"]
    sphinx("-D", "include_patterns=README.md,docs/start/quickstart.md", *places)  # warns about links to the other pages
    return folder / "site"


def test_site_loads_no_external_resources(site: Path):
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


@pytest.mark.browser
def test_search_finds_the_page_of_each_query(tmp_path: Path):
    sphinx("--conf-dir", ROOT / "docs", "--doctree-dir", tmp_path / "doctrees", ROOT, tmp_path / "site")
    missed = {}
    with browser_page() as (page, _), (Path(__file__).parent / "searches.csv").open() as file:
        for row in csv.DictReader(file):
            page.goto(f"{(tmp_path / 'site' / 'search.html').as_uri()}?q={row['query']}")
            page.locator("#search-results .search-summary", has_text="found").wait_for()
            links = page.locator("#search-results ul.search > li > a").all()[:3]
            found = [link.get_attribute("href") or "" for link in links]
            if not any(row["page"] in link for link in found):
                missed[row["query"]] = found
    assert missed == {}
