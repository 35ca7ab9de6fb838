"""What the ranks of a run and the process that starts them tell each other, through the environment and a pipe."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from toolkit.experts.parallel.nodes import launched_world

REPORT_PIPE = "TOOLKIT_REPORT_PIPE"
"""The file descriptor on which ranks send lines to the process that started them."""
RESTARTED = "TOOLKIT_RESTARTED"
"""JSON for ranks that are started again: the folder of the run, None where they had none yet, and `past_restarts`."""
STORE = "TOOLKIT_STORE"
"""The file in which ranks of one machine find each other."""
ELASTIC = "TOOLKIT_ELASTIC"
"""Set where the number of processes may be any, because it changes with the machines that there are."""
FOLDER, CAUSE, FINISHED = "folder: ", "cause: ", "finished: "
"""How lines on the pipe begin that are not for the user: where the run is, what ended a rank, and that the run in this
folder has its results, summary and pictures."""


def send(line: str) -> bool:
    """Write `line` to the process that started this rank; False where there is none, or it is gone."""
    with contextlib.suppress(KeyError, OSError):
        os.write(int(os.environ[REPORT_PIPE]), (" ".join(line.split()) + "\n").encode())
        return True
    return False


def restarted(folder: Path | None, reasons: Sequence[str]) -> dict[str, str]:
    """The environment of ranks that are started again, because of the last of `reasons`."""
    return {RESTARTED: json.dumps({"folder": folder and str(folder), "reasons": list(reasons)})}


def command_to_continue(run_dir: Path | None, folder: Path) -> str:
    """What to type to train on in `folder`: this command, and the folder where `run_dir`, its own, does not name it."""
    more = [] if run_dir is not None else ["--run-dir", str(folder)]
    if launched_world() is not None and REPORT_PIPE not in os.environ:  # of which this process is a part only
        return f"run the same command with {' '.join(more)}" if more else "run the same command again"
    return f"run `{shlex.join([*sys.orig_argv, *more])}`"


def stopped_at_once(run_dir: Path | None, folder: Path) -> str:
    """What a second Ctrl-C says of the run in `folder`."""
    lost = "steps since the last checkpoint are lost"
    return f"stopped by Ctrl-C: {lost}; {command_to_continue(run_dir, folder)} to continue."


def past_restarts() -> list[str]:
    """Why the ranks of this run were started again, oldest first; empty at the first start.

    From `--max-restarts`, or from torchrun and `accelerate launch`, which do not say why.
    """
    if RESTARTED in os.environ:
        return list(json.loads(os.environ[RESTARTED])["reasons"])
    count = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return ["a process failed, and its launcher started all again."] * count


def folder_to_continue() -> Path | None:
    """The folder of the run that was started again by `--max-restarts`, or None."""
    folder = json.loads(os.environ[RESTARTED])["folder"] if RESTARTED in os.environ else None
    return Path(folder) if folder else None
