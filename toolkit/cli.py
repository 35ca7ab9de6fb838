"""The command line: one optional preset word, then typed overrides. The only place that knows tyro.

python recipes/mnist_moe.py                            the first preset
python recipes/mnist_moe.py debug --experts 16         another preset, one number changed
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import re
import signal
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from toolkit.config import foreign_flags
from toolkit.config.run import RunConfig
from toolkit.errors import EXIT_BUG, EXIT_DONE, EXIT_INTERRUPTED, EXIT_PREEMPTED, EXIT_USER_ERROR, Preempted, UserError
from toolkit.launch import world

C = TypeVar("C", bound=RunConfig)


def run_recipe(main: Callable[[C], Any], presets: Mapping[str, Callable[[], C]], doc: str | None = None) -> None:
    """The last line of a recipe: parse, start the processes that were asked for, run `main`, leave with an exit code.

    0 done, 2 bad input (one line), 75 asked to stop and saved, 130 Ctrl-C, 1 a bug (with its traceback).
    """
    try:
        for number in world.STOP_SIGNALS:
            signal.signal(number, world.stop_before_training)
        config = parse(presets, sys.argv[1:], doc)
        world.check_world(config)
        if world.must_start_processes(config.num_processes):
            sys.exit(world.start_processes(config))
        main(config)
    except UserError as error:
        world.report(str(error))
        world.leave(EXIT_USER_ERROR)
    except Preempted as stop:
        world.report(str(stop), label="")
        world.leave(EXIT_PREEMPTED)
    except KeyboardInterrupt:
        world.report("stopped by Ctrl-C.", label="")
        world.leave(EXIT_INTERRUPTED)
    except Exception:
        sys.excepthook(*sys.exc_info())
        world.leave(EXIT_BUG)
    world.leave(EXIT_DONE)


def parse(presets: Mapping[str, Callable[[], C]], args: Sequence[str], doc: str | None = None) -> C:
    """The config that `args` ask for. Raises UserError with one sentence for whatever is wrong with them."""
    import tyro

    args = list(args)
    first = next(iter(presets))
    preset = args.pop(0) if args and args[0] in presets else first
    if args and not args[0].startswith("-"):
        if args[0] in presets:
            raise UserError(f"two presets, {preset} and {args[0]}: take one.")
        raise UserError(f"unknown preset {args[0]!r}: {_nearest(args[0], presets) or f'take {_either(presets)}.'}")
    default = presets[preset]()
    flags = _flags(type(default))
    words, given = _read(args, flags, presets)
    if "--help" in words:
        _teach(presets, doc)
    captured = io.StringIO()
    try:
        with contextlib.redirect_stderr(captured):
            return tyro.cli(type(default), default=default, args=words, description="")
    except BrokenPipeError:  # --help | head
        world.leave(EXIT_DONE)
    except SystemExit as stop:
        if not stop.code:
            raise
        if refusal := _user_error_behind(stop):
            raise refusal from None
        box = " ".join(line.strip("│╭╮╰╯─ ") for line in captured.getvalue().splitlines())
        culprit = next((flag for flag in re.findall(r"--[\w.-]+", box) if flag in given), None)
        if culprit is None:
            raise UserError(f"the command line could not be read: {box}") from None
        raise UserError(f"{culprit} {given[culprit]}: take {_describe(flags[culprit])}.") from None


def _user_error_behind(error: BaseException | None) -> UserError | None:
    """The UserError that a config raised, which tyro takes for any ValueError and puts into a box."""
    while error is not None and not isinstance(error, UserError):
        error = error.__context__
    return error


def _teach(presets: Mapping[str, Callable[[], C]], doc: str | None) -> None:
    """What a recipe is and which presets it has, before tyro's table of flags."""
    width = max(map(len, presets))
    lines = [(doc or "").strip(), "", f"presets (the first word; {next(iter(presets))} if there is none):"]
    for name, build in presets.items():
        summary = (build.__doc__ or "").strip().partition("\n\n")[0]
        lines.append(f"  {name:{width}}  {' '.join(summary.split())}".rstrip())
    sys.stdout.write("\n".join([*lines, "", ""]).lstrip("\n"))


# --- flags -------------------------------------------------------------------------------------------------------


def _flags(config_type: type, prefix: str = "") -> dict[str, Any]:
    """Every flag of a config and the type of its value: None for a switch, which takes no value."""
    hints = get_type_hints(config_type)
    flags: dict[str, Any] = {}
    for field in dataclasses.fields(config_type):
        name, hint = field.name.replace("_", "-"), hints[field.name]
        if dataclasses.is_dataclass(hint):
            flags |= _flags(hint, f"{prefix}{name}.")  # type: ignore[arg-type]
        elif hint is bool:
            flags |= {f"--{prefix}{name}": None, f"--{prefix}no-{name}": None}
        else:
            flags[f"--{prefix}{name}"] = hint
    return flags


def _read(
    args: Sequence[str], flags: Mapping[str, Any], presets: Mapping[str, Any]
) -> tuple[list[str], dict[str, str]]:
    """`args` as tyro wants them, and the words that each flag was given. Raises UserError for what fits no flag."""
    words: list[str] = []
    given: dict[str, str] = {}
    rest, last = list(args), ""
    while rest:
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        flag = flag.replace("_", "-")
        if flag in ("-h", "--help"):
            return ["--help"], {}
        if not word.startswith("-"):
            if word in presets:
                raise UserError(f"unexpected {word!r}: a preset comes first, before the flags.")
            takes = "no value" if flags[last] is None else "one value"
            raise UserError(f"unexpected {word!r}: {last} takes {takes}.")
        if flag not in flags:
            if elsewhere := foreign_flags.remedy(flag):
                raise UserError(f"unknown flag {flag}: {elsewhere}.")
            raise UserError(f"unknown flag {flag}: {_nearest(flag, flags) or 'see --help.'}")
        last, hint = flag, flags[flag]
        if hint is None:
            if equals:
                raise UserError(f"{word}: a switch takes no value, write {flag}.")
            words.append(flag)
            continue
        values = [value] if equals else []
        many = get_origin(hint) is tuple
        while rest and not rest[0].startswith("--") and not (values and not many):
            values.append(rest.pop(0))
        if flag == "--resume" and not values:
            values = ["yes"]
        if not any(values):
            raise UserError(f"{flag} needs a value: take {_describe(hint)}.")
        given[flag] = " ".join(values)
        words += [
            flag,
            *("None" if value.lower() == "none" and type(None) in get_args(hint) else value for value in values),
        ]
    return words, given


def _nearest(word: str, known: Mapping[str, Any]) -> str | None:
    """A question that names the known word most like `word`, or None where there is none like it."""
    begins_alike = [name for name in known if len(word) > 4 and name.startswith(word)]
    alike = begins_alike or difflib.get_close_matches(word.lower(), known, n=1, cutoff=0.6)
    if not alike:  # a nested flag without its group
        alike = [name for name in known if name.rpartition(".")[2] == word.lstrip("-")]
    return f"did you mean {alike[0]}?" if alike else None


def _either(names: Mapping[str, Any] | Sequence[Any]) -> str:
    *most, last = [str(name) for name in names]
    return f"{', '.join(most)} or {last}" if most else last


def _describe(hint: Any) -> str:
    """What a value of type `hint` is, in words."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        options = [_describe(part).replace(" or ", ", ") for part in parts if part is not type(None)]
        return _either([*options, "none"])
    if origin is Literal:
        return _either(parts)
    if origin is tuple:
        return f"{_describe(parts[0])}, or several with spaces between"
    return {int: "an integer", float: "a number", Path: "a path"}.get(hint, "a word")
