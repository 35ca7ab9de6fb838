"""`toolkit env`: versions and machine, without importing torch, on any machine."""

from __future__ import annotations

import pytest

from toolkit.commands import main
from toolkit.errors import EXIT_DONE


def told(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    assert main(["env"]) == EXIT_DONE
    return {
        name.strip(): value for name, value in (line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    }


def test_env_prints_versions_and_machine(capsys: pytest.CaptureFixture[str]):
    found = told(capsys)
    import torch

    assert f"torch {torch.__version__.partition('+')[0]}" in found["packages"]  # CUDA builds add a suffix
    assert {"toolkit", "python", "NCCL", "GPUs", "processor", "memory"} <= set(found)
