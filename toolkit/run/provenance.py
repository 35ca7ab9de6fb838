"""Commit and versions of a run, and the check that all ranks start with the same settings."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import accelerate
import torch

from toolkit.errors import UserError
from toolkit.experts.parallel.collectives import gather_objects, world_size
from toolkit.run.config.run import RunConfig
from toolkit.run.config.settings import leaves
from toolkit.run.folder import recorded_config
from toolkit.version import __version__

OF_A_MACHINE = {"run_dir", "data_dir", "num_processes", "project", "run_name", "python"}
"""Settings and versions that can differ between ranks: folders and W&B variables of a machine, the Python version."""


def git_revision() -> str | None:
    """Return the commit of the running script, with `-modified` if tracked files differ from it; None without git."""
    script = Path(sys.argv[0] or ".")
    folder = script.parent if script.is_file() else Path.cwd()
    words = ["git", "-C", str(folder), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=-modified"]
    try:
        done = subprocess.run(words, capture_output=True, timeout=10, stdin=subprocess.DEVNULL, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace").strip()


def versions() -> dict[str, Any]:
    """Return the versions of the toolkit, torch, Accelerate and Python by name."""
    return {
        "toolkit": __version__,
        "torch": torch.__version__,
        "accelerate": accelerate.__version__,
        "python": platform.python_version(),
    }


def check_same_start(name: str, config: RunConfig) -> None:
    """Raise the same UserError on every rank unless all ranks have the same recipe, config, commit and versions.

    Ranks with different settings would train together unnoticed or hang. A collective.
    """
    if world_size() == 1:
        return
    settings = {**dict(leaves(recorded_config(name, config))), **versions(), "git_revision": git_revision()}
    first, *others = gather_objects({field: value for field, value in settings.items() if field not in OF_A_MACHINE})
    for rank, theirs in enumerate(others, start=1):
        for field in first | theirs:
            if first.get(field) != theirs.get(field):
                remedy = f"differs between ranks: rank 0 has {first.get(field)}. Start all processes alike"
                raise UserError(field=field, value=f"{theirs.get(field)} on rank {rank}", remedy=remedy)
