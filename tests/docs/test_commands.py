"""Fenced blocks marked `run` in the documentation run without errors, in page order."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.support.processes import ROOT
from tests.support.forked_python import forked_commands

PAGES = sorted(p for p in ROOT.glob("**/*.md") if not {".venv", "runs", "build"} & set(p.relative_to(ROOT).parts))
FENCE = re.compile(r"^```(?P<language>bash|python) run\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = [
    pytest.param(match["language"], match["code"], id=f"{page.relative_to(ROOT)}-{number}")
    for page in PAGES
    for number, match in enumerate(FENCE.finditer(page.read_text()), start=1)
]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the structure of the repository, which receives the runs."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("recipes", "accelerate_configs", "toolkit", "Makefile", "pyproject.toml", "benchmarks", "docs"):
        if (ROOT / name).exists():
            (folder / name).symlink_to(ROOT / name)
    return folder


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("commands")
    with forked_commands(folder):
        yield folder


@pytest.mark.parametrize(("language", "code"), BLOCKS)
def test_block_marked_run_exits_with_code_0(language: str, code: str, checkout: Path, commands: Path):
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(commands), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": str(ROOT),
        "VENV": sys.prefix,
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",  # forked ranks do not read the launcher's flags
        "WANDB_MODE": "disabled",  # its service takes longer to start than the runs
    }
    command = ["bash", "-euo", "pipefail", "-c", code] if language == "bash" else [str(commands / "python"), "-c", code]
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"
