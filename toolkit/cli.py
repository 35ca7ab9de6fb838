"""The command line: one optional preset word, then typed overrides. The only place that knows tyro.

    python recipes/mnist_moe.py                            the first preset
    python recipes/mnist_moe.py debug --experts 16         another preset, one number changed
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from toolkit.config import RunConfig
from toolkit.errors import EXIT_DONE, EXIT_PREEMPTED, EXIT_USER_ERROR, Preempted, UserError

C = TypeVar("C", bound=RunConfig)


def run_recipe(main: Callable[[C], Any], presets: Mapping[str, Callable[[], C]], doc: str | None = None) -> None:
    """The last line of a recipe: parse, start the processes that were asked for, run `main`, leave with an exit code.

    0 done, 2 bad input (one line), 75 asked to stop and saved, 1 a bug (with its traceback).
    """
    from toolkit import launch

    try:
        config = parse(presets, sys.argv[1:], doc)
        launch.check_world(config.num_processes)
        if launch.must_start_processes(config.num_processes):
            sys.exit(launch.start_processes(config))
        main(config)
    except UserError as error:
        launch.report(str(error))
        launch.leave(EXIT_USER_ERROR)
    except Preempted as stop:
        launch.report(str(stop))
        launch.leave(EXIT_PREEMPTED)
    launch.leave(EXIT_DONE)


def parse(presets: Mapping[str, Callable[[], C]], args: Sequence[str], doc: str | None = None) -> C:
    """The config that `args` ask for. Raises UserError with one sentence for whatever tyro would refuse."""
    import tyro

    args = list(args)
    name = args.pop(0) if args and args[0] in presets else next(iter(presets))
    if args and not args[0].startswith("-"):
        raise UserError(f"unknown preset {args[0]!r}: choose one of {', '.join(presets)}.")
    names = [f"{preset}: {(build.__doc__ or '').strip().splitlines()[0]}" for preset, build in presets.items()]
    description = f"{doc or ''}\n\nPresets (the first word; {next(iter(presets))} if none):\n" + "\n".join(names)
    default = presets[name]()
    captured = io.StringIO()
    try:
        with contextlib.redirect_stderr(captured):
            return tyro.cli(type(default), default=default, args=_normalise(args), description=description)
    except SystemExit as stop:
        if not stop.code:
            raise
        raise UserError(_one_sentence(captured.getvalue())) from None


def _normalise(args: list[str]) -> list[str]:
    """Bare `--resume` means `--resume yes`, as everywhere else."""
    bare = [i for i, arg in enumerate(args) if arg == "--resume" and (i + 1 == len(args) or args[i + 1].startswith("-"))]
    for index in reversed(bare):
        args.insert(index + 1, "yes")
    return ["--resume=no" if arg == "--no-resume" else arg for arg in args]


def _one_sentence(box: str) -> str:
    """What a tyro message box says, in one line: its first part, and the nearest flag where it names one."""
    lines = [line.strip("│╭╮╰╯─ ") for line in box.splitlines()]
    lines = [line for line in lines if line]
    body = " ".join(lines[1:]) if lines else "the command line could not be read"
    message = re.split(r"Argument helptext:|Perhaps you meant:|For full helptext", body)[0].strip()
    message = re.sub(r"^Error parsing \w+: (?=--)", "", message)
    nearest = re.search(r"Perhaps you meant: +(--[\w.-]+)", body)
    hint = f" Did you mean {nearest.group(1)}?" if nearest else " See --help."
    return message.rstrip(".") + "." + hint if not message.startswith("--") or nearest else message
