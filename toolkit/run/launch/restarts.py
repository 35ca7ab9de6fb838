"""Communication between ranks and their launcher, through the environment and files."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from toolkit.errors import reading
from toolkit.experts.parallel.nodes import launched_world, number_of_launcher

LAUNCH = "TOOLKIT_LAUNCH"
"""Folder of one launch by `--num-processes` or `--max-restarts`, set in its ranks."""
RESTARTED = "TOOLKIT_RESTARTED"
"""JSON for restarted ranks: run folder (None if there was none yet) and `past_restarts`."""
RUN = "run"
"""File in the launch folder that holds the path of the run folder."""


def tell(message: str) -> bool:
    """Write the reason of this exit for the launcher; return False without a launcher.

    Torch's agent reads this file (`torch.distributed.elastic.multiprocessing.errors`).
    """
    if LAUNCH not in os.environ:
        return False
    path = Path(os.environ["TORCHELASTIC_ERROR_FILE"])
    path.with_suffix(".partial").write_text(json.dumps({"message": message}))
    path.with_suffix(".partial").replace(path)
    return True


def tell_folder(folder: Path) -> None:
    """Send the run folder to the launcher, if any."""
    if LAUNCH in os.environ:
        Path(os.environ[LAUNCH], RUN).write_text(str(folder))


def told_folder(launch: Path) -> Path | None:
    """Return the run folder sent by a rank of `launch`, or None."""
    return Path((launch / RUN).read_text()) if (launch / RUN).exists() else None


def restarted(folder: Path | None, reasons: Sequence[str]) -> dict[str, str]:
    """Return the environment of ranks restarted for the last of `reasons`."""
    return {RESTARTED: json.dumps({"folder": folder and str(folder), "reasons": list(reasons)})}


def command_to_continue(run_dir: Path | None, folder: Path) -> str:
    """Return how to continue the run in `folder`: this command, plus the folder unless `run_dir` is given."""
    more = [] if run_dir is not None else ["--run-dir", str(folder)]
    if launched_world() is not None and LAUNCH not in os.environ:  # another launcher's command is not known
        return f"run the same command with {' '.join(more)}" if more else "run the same command again"
    return f"run `{shlex.join([*sys.orig_argv, *more])}`"


def stopped_at_once(run_dir: Path | None, folder: Path) -> str:
    """Return the message of a second Ctrl-C in the run in `folder`."""
    lost = "steps since the last checkpoint are lost"
    return f"stopped by Ctrl-C: {lost}; {command_to_continue(run_dir, folder)} to continue."


@reading(RESTARTED, "Unset it.")
def past_restarts() -> list[str]:
    """Return why the ranks of this run were restarted, oldest first; empty at the first start.

    torchrun and `accelerate launch` do not say why.
    """
    if RESTARTED in os.environ:
        return list(json.loads(os.environ[RESTARTED])["reasons"])
    count = number_of_launcher("TORCHELASTIC_RESTART_COUNT") or 0
    return ["a process failed, and its launcher restarted all."] * count


@reading(RESTARTED, "Unset it.")
def folder_to_continue() -> Path | None:
    """Return the folder of the run that `--max-restarts` restarted, or None."""
    folder = json.loads(os.environ[RESTARTED])["folder"] if RESTARTED in os.environ else None
    return Path(folder) if folder else None
