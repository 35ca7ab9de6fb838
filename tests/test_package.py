"""The wheel has code, types and metadata, and works outside the clone."""

import re
import shutil
import subprocess
import sys
import tomllib
from email.parser import Parser
from pathlib import Path

import pytest

from benchmarks.support.processes import ROOT, program_environment
from toolkit.version import __version__

FOR_DEVELOPERS = {"bench", "docs", "dev", "all"}
TRAIN_AND_LIST_MODULES = """
import runpy
import sys
from pathlib import Path
sys.argv = ["own_loop.py", "debug", "--cpu", "--tracker", "none", "--run-dir", "run"]
try:
    runpy.run_path("own_loop.py", run_name="__main__")
except SystemExit as exit:
    assert exit.code == 0
import toolkit
for module in (toolkit, toolkit.experts):
    for name in module.__all__:
        getattr(module, name)
files = {module.__file__ for name, module in sys.modules.items() if name.partition(".")[0] == "toolkit"}
Path("modules.txt").write_text("\\n".join(files))
"""


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=cwd, env=program_environment(**environment), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a wheel of a copy, without leftovers of earlier builds, and return the folder that it is installed in."""
    source, wheels, target = (tmp_path_factory.mktemp(name) for name in ("source", "wheels", "target"))
    shutil.copytree(ROOT / "toolkit", source / "toolkit", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = ("-m", "pip", "--disable-pip-version-check", "--quiet")
    offline = ("--no-deps", "--no-index")
    run(*pip, "wheel", *offline, "--no-build-isolation", "--wheel-dir", wheels, source, cwd=source)
    options = (*offline, "--no-compile", "--find-links", wheels, "--target", target)
    run(*pip, "install", *options, f"moe-toolkit=={__version__}", cwd=wheels)
    return target


def test_wheel_has_every_file_of_the_package(installed: Path):
    def files(folder: Path) -> set[Path]:
        found = (path.relative_to(folder) for path in (folder / "toolkit").rglob("*") if path.is_file())
        return {path for path in found if path.suffix not in (".md", ".pyc")}

    assert files(installed) == files(ROOT)


def test_example_trains_and_public_names_are_imported_from_the_wheel(installed: Path, tmp_path: Path):
    shutil.copy(ROOT / "docs" / "examples" / "own_loop.py", tmp_path)
    run("-c", TRAIN_AND_LIST_MODULES, cwd=tmp_path, PYTHONPATH=str(installed))
    assert (tmp_path / "run" / "results.json").is_file()
    files = (tmp_path / "modules.txt").read_text().splitlines()
    assert len(files) > 100
    assert [file for file in files if not Path(file).is_relative_to(installed)] == []


def test_command_of_the_wheel_prints_help_and_version(installed: Path, tmp_path: Path):
    command = installed / "bin" / "toolkit"
    assert "usage: toolkit" in run(command, "--help", cwd=tmp_path, PYTHONPATH=str(installed))
    assert run(command, "--version", cwd=tmp_path, PYTHONPATH=str(installed)) == f"{__version__}\n"


def test_extra_all_has_every_extra_of_users():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

    def requirements(extra: str) -> set[str]:
        """Return the requirements of `extra`, nested extras included."""
        nested = [re.fullmatch(r"moe-toolkit\[(.*)\]", requirement) for requirement in extras[extra]]
        names = [name for match in nested if match for name in match[1].split(",")]
        return set(extras[extra]).union(*map(requirements, names))

    assert [name for name in extras.keys() - FOR_DEVELOPERS if not set(extras[name]) <= requirements("all")] == []


def test_metadata_has_the_version_and_project_urls(installed: Path):
    (file,) = installed.glob("*.dist-info/METADATA")
    metadata = Parser().parsestr(file.read_text(encoding="utf-8"))
    assert metadata["Version"] == __version__
    assert {"Repository", "Changelog", "Security"} <= {url.partition(",")[0] for url in metadata.get_all("Project-URL")}
