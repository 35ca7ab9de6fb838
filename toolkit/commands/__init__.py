"""The `toolkit` command: one sub-command per module, imported on demand.

    toolkit checkpoint inspect runs/mnist_moe/2026-11-21

Each module has `main(argv) -> int`, which takes its arguments and returns the exit code: 0 done, 2 bad input or a
finding (one line on stderr for a `UserError`). `toolkit.run.arguments` parses the arguments.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import NamedTuple

from toolkit.errors import (
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_USER_ERROR,
    UserError,
    did_you_mean,
    is_out_of_memory,
    system_error,
)
from toolkit.run.console import print_nowhere
from toolkit.version import __version__


class Command(NamedTuple):
    """Module of a sub-command, and its summary in `toolkit --help`."""

    module: str
    summary: str


COMMANDS = {
    "lab": Command("toolkit.lab.command", "replay recorded routing traces against every planner"),
    "audit": Command("toolkit.audit.command", "check an MoE checkpoint for missing, repeated or broken experts"),
    "checkpoint": Command("toolkit.commands.checkpoint", "inspect or export a checkpoint"),
    "adapter": Command("toolkit.commands.adapter", "convert adapters of experts between PEFT, vLLM and SGLang"),
    "plan": Command("toolkit.commands.plan", "estimate the memory of each GPU for fine-tuning an MoE model"),
    "sweep": Command("toolkit.commands.sweep.command", "run a grid of runs of one recipe, with tables and pictures"),
    "compare": Command(
        "toolkit.commands.report.compare", "print runs side by side: settings that differ, final numbers"
    ),
    "report": Command("toolkit.commands.report.page", "write a page with curves, experts and settings of several runs"),
    "dashboard": Command(
        "toolkit.commands.report.dashboard", "make a workspace of W&B with the curves of a project's runs"
    ),
    "doctor": Command(
        "toolkit.doctor.command", "compare training in one process and in several, or report on the machine"
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sub-command in `argv` (None: the command line) and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _run(words)
        sys.stdout.flush()
    except UserError as error:
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        sys.stderr.write("stopped by Ctrl-C.\n")
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # toolkit ... | head
        print_nowhere()
        return EXIT_DONE
    except Exception as error:
        said = "out of memory. Use a machine with more." if is_out_of_memory(error) else system_error(error)
        if said is None:
            raise
        print_nowhere()  # stdout may be on a full disk
        sys.stderr.write(f"error: {said}\n")
        return EXIT_USER_ERROR
    return code


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        sys.stdout.write(_help())
        return EXIT_DONE
    if words[0] == "--version":
        sys.stdout.write(f"{__version__}\n")
        return EXIT_DONE
    name, *rest = words
    if name not in COMMANDS:
        remedy = did_you_mean(name, COMMANDS, f"Take one of {', '.join(COMMANDS)}.")
        raise UserError(f"unknown command {name!r}. {remedy}")
    return importlib.import_module(COMMANDS[name].module).main(rest)


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(["usage: toolkit COMMAND ...", "", *lines, "", "toolkit COMMAND --help tells more.", ""])
