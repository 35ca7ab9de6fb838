"""The command line of a recipe: an optional preset, then flags that override its values. Only this file imports tyro.

python recipes/mnist_moe.py                            the first preset
python recipes/mnist_moe.py debug --experts 16         another preset with one value changed
python recipes/mnist_moe.py --config mine.yaml         flags from a file; those on the command line count more
"""

from __future__ import annotations

import contextlib
import difflib
import io
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin

from toolkit.errors import (
    EXIT_BUG,
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_PREEMPTED,
    EXIT_USER_ERROR,
    Preempted,
    StepOutOfMemory,
    UserError,
    is_out_of_memory,
)
from toolkit.run.config import foreign_flags
from toolkit.run.config.choices import alternatives
from toolkit.run.config.file import flags_of_file
from toolkit.run.config.flags import CONFIG, help_text, is_enum, takes_several, value_types
from toolkit.run.config.run import RunConfig
from toolkit.run.launch import supervisor, world
from toolkit.run.launch.restarts import CAUSE, send
from toolkit.run.launch.streams import prepare_streams

C = TypeVar("C", bound=RunConfig)

LARGEST_INTEGER = 2**63 - 1
"""Of int64, which torch counts in."""


def run_recipe(main: Callable[[C], Any], presets: Mapping[str, Callable[[], C]], doc: str | None = None) -> None:
    """Parse the command line, start the processes of --num-processes, run `main` and exit: the last line of a recipe.

    Exit codes: 0 done, 1 a bug (with traceback), 2 bad input or too little memory (one line), 75 preempted after a
    checkpoint, or before training, 130 Ctrl-C.
    """
    prepare_streams()
    try:
        world.begin_handling_signals()
        config = parse(presets, sys.argv[1:], doc)
        world.check_world(config)
        if supervisor.must_start_processes(config):
            sys.exit(supervisor.start_processes(config))
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
    except StepOutOfMemory as error:
        world.start_again(error)
    except Exception as error:
        if is_out_of_memory(error):
            remedy = "--auto-batch-size, more --gradient-accumulation-steps, more processes, or a smaller model"
            world.report(f"out of memory: use {remedy}.")
            world.leave(EXIT_USER_ERROR)
        elif lost := world.lost_process(error):
            world.report(lost)
        else:
            sys.excepthook(*sys.exc_info())
            send(f"{CAUSE}{type(error).__name__}: {error}")
        world.leave(EXIT_BUG)
    world.leave(EXIT_DONE)


def parse(presets: Mapping[str, Callable[[], C]], args: Sequence[str], doc: str | None = None) -> C:
    """The config of a preset, changed by the file of --config, changed by the flags in `args`.

    Raises UserError for any other word, flag or value. --help prints and exits.
    """
    import tyro

    args = list(args)
    first = next(iter(presets))
    preset = args.pop(0) if args and args[0] in presets else first
    if args and not args[0].startswith("-"):
        if args[0] in presets:
            raise UserError(f"two presets, {preset} and {args[0]}: take one.")
        raise UserError(f"unknown preset {args[0]!r}: {_nearest(args[0], presets) or f'take {_either(presets)}.'}")
    try:
        default = presets[preset]()
    except TypeError as error:
        if "__init__() missing" not in str(error):
            raise
        raise UserError(f"the preset {preset} leaves out a field that has no default ({error}): give it one.") from None
    flags = value_types(default) | {CONFIG: Path}
    if {"-h", "--help"} & set(args):
        _print_help(help_text(sys.argv[0], doc, presets, default))
    words, given = _read(args, flags, presets)
    in_file: dict[str, str] = {}
    if path := given.get(CONFIG):
        file_words, in_file = _read_file(Path(path), flags, presets)
        words = file_words + words
    captured = io.StringIO()
    try:
        with contextlib.redirect_stderr(captured):
            config = tyro.cli(type(default), default=default, args=words, description="")
            object.__setattr__(config, "preset", preset)  # which is frozen
            return config
    except SystemExit as stop:
        if refusal := _user_error_behind(stop):
            raise refusal from None
        box = " ".join(line.strip("│╭╮╰╯─ ") for line in captured.getvalue().splitlines())
        culprit = next((flag for flag in re.findall(r"--[\w.-]+", box) if flag in in_file | given), None)
        if culprit is None:
            raise UserError(f"the command line could not be read: {box}") from None
        where = "" if culprit in given else f"{CONFIG} {path}: "
        value = (in_file | given)[culprit]
        raise UserError(f"{where}{culprit} {value}: take {_describe(flags[culprit])}.") from None


def _user_error_behind(error: BaseException | None) -> UserError | None:
    """The UserError that a config raised: tyro catches it as a ValueError, prints a box and exits."""
    while error is not None and not isinstance(error, UserError):
        error = error.__context__
    return error


def _print_help(text: str) -> NoReturn:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:  # --help | head
        world.leave(EXIT_DONE)
    sys.exit(EXIT_DONE)


def _read(
    args: Sequence[str], flags: Mapping[str, Any], presets: Mapping[str, Any], *, may_be_empty: bool = False
) -> tuple[list[str], dict[str, str]]:
    """`args` in tyro's form, and the values of each flag. Raises UserError for what is no flag with its value.

    `may_be_empty`: a text without letters and a tuple without items are values, and not a variable that is not set.
    """
    words: list[str] = []
    given: dict[str, str] = {}
    rest = list(args)
    last = ""
    while rest:
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        flag = flag.replace("_", "-")
        if not word.startswith("-"):
            if word in presets:
                raise UserError(f"unexpected {word!r}: a preset comes first, before the flags.")
            takes = "no value" if flags[last] is None else "one value"
            raise UserError(f"unexpected {word!r}: {last} takes {takes}.")
        if flag not in flags:
            raise UserError(f"unknown flag {flag}: {instead_of(flag, flags)}")
        last = flag
        hint = flags[flag]
        if hint is None:
            if equals:
                raise UserError(f"{word}: a switch takes no value, write {flag}.")
            words.append(flag)
            continue
        values = [value] if equals else []
        many = takes_several(hint)
        while rest and not rest[0].startswith("--") and not (values and not many):
            values.append(rest.pop(0))
        if flag == "--resume" and not values:
            values = ["yes"]
        is_empty = may_be_empty and (many if not values else str in alternatives(hint))
        if not any(values) and not is_empty:
            raise UserError(f"{flag} needs a value: take {_describe(hint)}.")
        if flag == CONFIG:
            if flag in given:
                raise UserError(f"{flag} {values[0]}: {given[flag]} was given as well: take one file.")
            given[flag] = values[0]
            continue
        for value in values:
            _check_value(flag, value, hint)
        given[flag] = " ".join(values)
        words += [flag, *(_as_python(value, hint) for value in values)]
    return words, given


def _check_value(flag: str, value: str, hint: Any) -> None:
    """Raise UserError for a text that no path can be, and an integer that no tensor can hold."""
    if "\0" in value:
        raise UserError(f"{flag} {value!r}: take a value without a null character.")
    if any(int in (part, *get_args(part)) for part in alternatives(hint)):
        try:
            number = int(value)
        except ValueError:  # which tyro refuses, or reads as another type
            return
        if not -LARGEST_INTEGER - 1 <= number <= LARGEST_INTEGER:
            raise UserError(f"{flag} {value}: take an integer of at most {LARGEST_INTEGER}.")


def _as_python(value: str, hint: Any) -> str:
    """`value` as tyro writes it: None, True and False where `hint` has them."""
    constants = {type(None): ("none",), bool: ("true", "false")}
    words = [word for part in alternatives(hint) for word in constants.get(part, ())]
    return value.capitalize() if value.lower() in words else value


def _read_file(path: Path, flags: Mapping[str, Any], presets: Mapping[str, Any]) -> tuple[list[str], dict[str, str]]:
    """What `_read` makes of the flags in the file of --config. Its UserErrors name the file."""
    args: list[str] = []
    try:
        for flag, values in flags_of_file(path):
            if flag == CONFIG:
                raise UserError(f"unknown flag {flag}: a file cannot name another one.")
            if flag not in flags or flags[flag] is not None:
                args += [flag, *values]
                continue
            group, dot, name = flag.removeprefix("--").rpartition(".")
            off = f"--{group}{dot}no-{name}"
            switches = {"true": flag, "false": off if off in flags else None}
            if (switch := switches.get(" ".join(values).lower())) is None:
                raise UserError(f"{flag} {' '.join(values)}: take {'true or false' if off in flags else 'true'}.")
            args.append(switch)
        return _read(args, flags, presets, may_be_empty=True)
    except UserError as error:
        raise UserError(f"{CONFIG} {path}: {str(error).removeprefix(f'{CONFIG} {path}: ')}") from None


def instead_of(flag: str, flags: Mapping[str, Any]) -> str:
    """What to type instead of `flag`, which is not in `flags`, as the end of a sentence."""
    members = [name for name in flags if name.startswith(f"{flag}.") and ".no-" not in name]
    if members:
        more = ", ..." if len(members) > 4 else ""
        return f"it is a group of flags: {', '.join(members[:4])}{more}."
    if elsewhere := foreign_flags.remedy(flag, flags):
        return f"{elsewhere}."
    return _nearest(flag, flags) or "see --help."


def _nearest(word: str, known: Mapping[str, Any]) -> str | None:
    """ "did you mean ...?" with the known word closest to `word`; None if there is no close one."""
    begins_alike = [name for name in known if len(word) > 4 and name.startswith(word)]
    # A nested flag may have been typed without its group.
    alike = begins_alike or [name for name in known if name.rpartition(".")[2] == word.lstrip("-")]
    if not alike:  # without the dashes, which would make short names alike
        names = {name.rpartition(".")[2]: name for name in known} | {name.lstrip("-"): name for name in known}
        names = {name.lstrip("-"): full for name, full in names.items()}
        alike = [names[name] for name in difflib.get_close_matches(word.lstrip("-").lower(), names, n=1, cutoff=0.8)]
    return f"did you mean {alike[0]}?" if alike else None


def _either(names: Mapping[str, Any] | Sequence[Any]) -> str:
    *most, last = [str(name) for name in names]
    return f"{', '.join(most)} or {last}" if most else last


def _describe(hint: Any) -> str:
    """The values of type `hint`, in words."""
    parts = alternatives(hint)
    if len(parts) > 1:
        options = [_describe(part).replace(" or ", ", ") for part in parts if part is not type(None)]
        return _either([*options, *["none"] * (type(None) in parts)])
    if get_origin(hint) is Literal:
        return _either(get_args(hint))
    if is_enum(hint):
        return _either(hint.__members__)
    if get_origin(hint) in (tuple, list):
        return f"{_describe(get_args(hint)[0])}, or several with spaces between"
    return {bool: "true or false", int: "an integer", float: "a number", Path: "a path"}.get(hint, "a word")
