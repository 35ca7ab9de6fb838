"""What `pip install` brings is complete: the wheel has code, types and metadata, and works far from the clone."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from email.parser import Parser
from pathlib import Path

import pytest

from tests.support.helpers import ROOT, program_environment
from toolkit.version import __version__

SOURCES = ("toolkit", "pyproject.toml", "README.md", "LICENSE")
FOR_DEVELOPERS = {"bench", "docs", "dev", "all"}
EVERY_NAME = """
import sys
import toolkit
from toolkit import experts
for module in (toolkit, experts):
    for name in module.__all__:
        getattr(module, name)
print(*{module.__file__ for name, module in sys.modules.items() if name.partition(".")[0] == "toolkit"}, sep="\\n")
"""


def run(*command: str | Path, folder: Path, **environment: str) -> str:
    """Returns what `command` prints in `folder`."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=program_environment(**environment),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which a wheel is installed that was built of a copy: in the clone, what an earlier build left there
    would get into it."""
    source, wheels, target = (tmp_path_factory.mktemp(name) for name in ("source", "wheels", "target"))
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source)
    pip = ("-m", "pip", "--disable-pip-version-check", "--quiet")
    offline = ("--no-deps", "--no-index")
    run(*pip, "wheel", *offline, "--no-build-isolation", "--wheel-dir", wheels, source, folder=source)
    where = ("--find-links", wheels, "--target", target)
    run(*pip, "install", *offline, *where, f"moe-toolkit=={__version__}", folder=wheels)
    return target


def test_it_has_every_file_of_the_package(installed: Path):
    def files(folder: Path) -> set[Path]:
        found = (path.relative_to(folder) for path in (folder / "toolkit").rglob("*") if path.is_file())
        return {path for path in found if path.suffix not in (".md", ".pyc")}

    assert files(installed) == files(ROOT)


def test_every_public_name_is_there_and_comes_from_it(installed: Path, tmp_path: Path):
    loaded = run("-c", EVERY_NAME, folder=tmp_path, PYTHONPATH=str(installed)).splitlines()
    assert loaded
    assert [file for file in loaded if not Path(file).is_relative_to(installed)] == []


def test_its_command_works_far_from_the_clone(installed: Path, tmp_path: Path):
    command = installed / "bin" / "toolkit"
    assert "usage: toolkit" in run(command, "--help", folder=tmp_path, PYTHONPATH=str(installed))
    assert run(command, "--version", folder=tmp_path, PYTHONPATH=str(installed)) == f"{__version__}\n"


def test_an_example_trains_with_it(installed: Path, tmp_path: Path):
    shutil.copy(ROOT / "docs" / "examples" / "own_loop.py", tmp_path)
    words = ("own_loop.py", "debug", "--cpu", "--tracker", "none", "--run-dir", "run")
    run(*words, folder=tmp_path, PYTHONPATH=str(installed))
    assert (tmp_path / "run" / "results.json").is_file()


def test_all_has_every_extra_of_users():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

    def installed_by(extra: str) -> set[str]:
        """Also by the extras of the toolkit that it names."""
        named = [re.fullmatch(r"moe-toolkit\[(.*)\]", requirement) for requirement in extras[extra]]
        inner = [name for match in named if match for name in match[1].split(",")]
        return set(extras[extra]).union(*map(installed_by, inner))

    assert {name for name in extras.keys() - FOR_DEVELOPERS if not set(extras[name]) <= installed_by("all")} == set()


def test_its_metadata_name_the_version_and_the_pages(installed: Path):
    (file,) = installed.glob("*.dist-info/METADATA")
    metadata = Parser().parsestr(file.read_text(encoding="utf-8"))
    assert metadata["Version"] == __version__
    assert {"Repository", "Changelog", "Security"} <= {url.partition(",")[0] for url in metadata.get_all("Project-URL")}
