"""`toolkit env`: versions and machine, without importing torch, on any machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolkit.commands import main
from toolkit.errors import EXIT_DONE
from toolkit.run import hardware


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


def test_the_limit_of_memory_is_the_least_of_the_groups(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    inner = tmp_path / "slice" / "job"
    inner.mkdir(parents=True)
    monkeypatch.setattr(hardware, "CGROUPS", tmp_path)
    monkeypatch.setattr(hardware, "own_groups", lambda: ["0::/slice/job"])
    assert hardware.memory_limit_bytes() is None
    (inner / "memory.max").write_text("max\n")
    assert hardware.memory_limit_bytes() is None
    (tmp_path / "slice" / "memory.max").write_text(f"{3 << 20}\n")
    assert hardware.memory_limit_bytes() == 3 << 20
    (inner / "memory.max").write_text(f"{2 << 20}\n")
    assert hardware.memory_limit_bytes() == 2 << 20
    monkeypatch.setattr(hardware, "own_groups", lambda: ["5:cpu,memory:/job"])
    (tmp_path / "memory" / "job").mkdir(parents=True)
    (tmp_path / "memory" / "job" / "memory.limit_in_bytes").write_text(f"{1 << 20}\n")
    assert hardware.memory_limit_bytes() == 1 << 20
