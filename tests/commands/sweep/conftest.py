"""A toy recipe whose runs are forks, because a new process spends seconds on imports."""

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest

from tests.commands.sweep.toy import RECIPE
from tests.support.forked_python import ForkedPython
from toolkit.commands.sweep import cells


def fork_cell(command: list[str], *, env: dict[str, str], stdout: IO[bytes], **_: Any) -> ForkedPython:
    return ForkedPython(*command[1:], env=env, output=Path(stdout.name))


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(
        cells, "subprocess", SimpleNamespace(Popen=fork_cell, DEVNULL=subprocess.DEVNULL, STDOUT=subprocess.STDOUT)
    )
    script = tmp_path / "toy.py"
    script.write_text(RECIPE)
    return script
