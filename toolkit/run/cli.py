"""The command line of a recipe: an optional preset, then flags that override its values. Only this file imports tyro.

python recipes/mnist_moe.py                            the first preset
python recipes/mnist_moe.py debug --experts 16         another preset with one value changed
python recipes/mnist_moe.py --config mine.yaml         flags from a file; those on the command line count more
"""

from __future__ import annotations

import contextlib
import io
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast, get_args

from toolkit.errors import (
    EXIT_BUG,
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_USER_ERROR,
    Preempted,
    StepOutOfMemory,
    UserError,
    did_you_mean,
    is_out_of_memory,
    system_error,
)
from toolkit.experts.options import Options
from toolkit.experts.parallel.nodes import launched_world
from toolkit.run.config.file import CONFIG, read_file
from toolkit.run.config.flags import OF_GUIDES, flags_of, replace_fields
from toolkit.run.config.run import RunConfig
from toolkit.run.config.settings import leaves
from toolkit.run.launch import agent, exits, world
from toolkit.run.launch.signals import begin_handling_signals

if TYPE_CHECKING:
    from tyro.constructors import ConstructorRegistry

C = TypeVar("C", bound=RunConfig)


def run_recipe(main: Callable[[C], Any], presets: Mapping[str, Callable[[], C]], doc: str | None = None) -> None:
    """Parse the command line, start the processes of --num-processes, run `main` and exit: the last line of a recipe.

    Exit codes: 0 done, 1 bug (with traceback), 2 bad input or out of memory (one line), 75 preempted after a
    checkpoint or before training, 130 Ctrl-C, during training after a checkpoint.

    Args:
        main: The recipe.
        presets: Functions that return a config by name. The first one is the default.
        doc: Description in `--help`.

    Raises:
        UserError: If Python is interactive, such as in a notebook.

    Example:
        if __name__ == "__main__":
            tk.run_recipe(main, {"full": full, "debug": debug}, __doc__)
    """
    if hasattr(sys, "ps1"):  # the recipe would exit an interactive Python
        raise UserError("run_recipe: reads a command line. Call main(config) in a notebook.")
    try:
        _run_and_exit(main, presets, doc)
    except Preempted as stop:  # in training, or by a signal at any time, even while another error is reported
        exits.end(stop.code, str(stop), label="")
    except KeyboardInterrupt as stop:
        exits.end(EXIT_INTERRUPTED, str(stop) or exits.STOPPED, label="")


def _run_and_exit(main: Callable[[C], Any], presets: Mapping[str, Callable[[], C]], doc: str | None) -> NoReturn:
    """Run `main`, and exit with one line for an error: stops are the caller's."""
    try:
        exits.end_with_launcher()
        begin_handling_signals()
        config = parse(presets, sys.argv[1:], doc)
        world.check_world(config)
        if config.auto_batch_size and launched_world() is None:
            from toolkit.run.launch.largest_batch import start_with_largest_batch

            start_with_largest_batch(config)
        if agent.must_start_processes(config):
            sys.exit(agent.start_processes(config))
        main(config)
    except UserError as error:
        exits.end(EXIT_USER_ERROR, str(error))
    except StepOutOfMemory as error:
        exits.start_again(error)
    except Exception as error:
        if said := system_error(error):
            exits.end(EXIT_USER_ERROR, said)
        if is_out_of_memory(error):
            # If a step ran out of memory, smaller micro-batches have already been tried.
            exits.end(EXIT_USER_ERROR, "out of memory: use more processes, or a smaller model.")
        if lost := exits.lost_process(error):
            exits.report(lost)
        else:
            exits.report_bug(error)
        exits.leave(EXIT_BUG)
    exits.leave(EXIT_DONE)


def parse(presets: Mapping[str, Callable[[], C]], args: Sequence[str], doc: str | None = None) -> C:
    """Return the config of a preset, overridden by the --config file and then by the flags in `args`.

    --help prints the common flags and exits, `--help all` prints every flag.

    Raises:
        SystemExit: For a word that a flag cannot take, after tyro has printed its error.
        UserError: For an unknown word or flag, or an invalid value.
    """
    import tyro

    args = list(args)
    preset = args.pop(0) if args and not args[0].startswith("-") else next(iter(presets))
    if preset not in presets:
        remedy = did_you_mean(preset, presets, f"Take one of {', '.join(presets)}.")
        raise UserError(f"unknown preset {preset!r}. {remedy}")
    default = presets[preset]()
    flags = flags_of(type(default))
    if "--help" in args and args[args.index("--help") + 1 :][:1] != ["all"]:
        _print_help(_short_help(presets, default, doc))
    words = _as_tyro([word for word in args if word != "all" or "--help" not in args], flags)
    in_file: dict[str, Any] = {}
    where = ""
    if CONFIG in words:
        at = words.index(CONFIG)
        _, file, *_ = [*words[at:], ""]
        del words[at : at + 2]
        where = f"{CONFIG} {file}: "
        try:
            in_file = read_file(Path(file), dict(flags.values()))
        except UserError as error:
            raise UserError(f"{where}{error}") from None
    printed = io.StringIO()
    parsed: Any
    try:
        with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed):
            parsed, unknown = tyro.cli(
                type(default),
                default=default,
                args=words,
                description=_description(presets, doc),
                return_unknown_args=True,
                registry=_unchecked(),
            )
    except SystemExit as stop:
        if not stop.code:
            _print_help(printed.getvalue())
        exits.report(printed.getvalue(), label="")
        raise
    if unknown:
        if unknown[0] in presets:
            raise UserError(f"{unknown[0]}: comes after flags. Put the preset first.")
        kind = "flag" if unknown[0].startswith("-") else "word"
        ours = OF_GUIDES.get(unknown[0].lstrip("-"), unknown[0])
        raise UserError(f"unknown {kind} {unknown[0]}. {did_you_mean(ours, flags, 'See --help all.')}")
    typed = {flags[word][0] for word in words if word in flags}
    changes = in_file | {name: value for name, value in leaves(parsed) if name in typed}
    try:
        config = replace_fields(default, changes)
    except UserError as error:
        raise UserError(f"{where if error.field in in_file.keys() - typed else ''}{error}") from None
    _refuse_options_of_what_is_off(config, words)
    object.__setattr__(config, "preset", preset)  # the config is frozen
    return config


def _unchecked() -> ConstructorRegistry:
    """Let tyro return the values of options as dictionaries: they are checked with the values of a file."""
    from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructFieldSpec, StructTypeInfo

    registry = ConstructorRegistry()

    @registry.struct_rule
    def of_options(info: StructTypeInfo) -> StructConstructorSpec | None:
        if not isinstance(info.default, Options):
            return None
        fields = type(info.default).model_fields.items()
        return StructConstructorSpec(
            dict,
            tuple(
                StructFieldSpec(name, cast("type", field.annotation), getattr(info.default, name), field.description)
                for name, field in fields
            ),
        )

    return registry


def _refuse_options_of_what_is_off(config: RunConfig, words: Iterable[str]) -> None:
    """Raise UserError for a flag that has no effect because the switch of its group is off."""
    for group, options in config:
        if not isinstance(options, Options) or not options.switch:
            continue
        is_inside = options.switch in type(options).model_fields
        prefix = f"--{group.replace('_', '-')}."
        switch = f"{prefix if is_inside else '--'}{options.switch.replace('_', '-')}"
        typed = next((word for word in words if word.startswith(prefix) and word != switch), None)
        if typed and not getattr(options if is_inside else config, options.switch):
            raise UserError(f"{typed}: no effect without {switch}. Add {switch} or leave {typed} out.")


COMMON = ("epochs", "batch_size", "lr", "seed", "dataset", "run_dir", "num_processes", "cpu", "tracker", "experts")
"""Fields in the output of --help, if the recipe has them."""


def _as_tyro(args: Iterable[str], flags: Mapping[str, tuple[str, Any]]) -> list[str]:
    """Convert `args` to tyro's spelling of None, True and False, and `--resume` without a value to `--resume yes`.

    Raises UserError for an empty value, as from an unset shell variable.
    """
    words: list[str] = []
    flag = ""
    for arg in args:
        if arg.startswith("--"):
            name, equals, value = arg.partition("=")
            flag = name.replace("_", "-")
            words += [flag, value] if equals else [flag]
        else:
            words.append(arg)
        if words[-1] == "":
            raise UserError(f"{flag}: has no value. Give one.")
        _, hint = flags.get(flag, ("", None))
        constants = [str(part) for part in (None, True, False) if type(part) in get_args(hint)]
        if words[-1].capitalize() in constants:
            words[-1] = words[-1].capitalize()
    alone = [at for at, word in enumerate(words, 1) if word == "--resume" and [*words, "--"][at].startswith("--")]
    for at in reversed(alone):
        words.insert(at, "yes")
    return words


def _description(presets: Mapping[str, Any], doc: str | None) -> str:
    """Return the text of --help above the flags."""
    about, _, examples = (doc or "").strip().partition("\n\n")
    width = max(map(len, presets))
    said = {name: " ".join((build.__doc__ or "").split()) for name, build in presets.items()}
    names = [f"{name:{width}}  {re.split(r'[.](?: (?=[A-Z])|$)', text)[0]}" for name, text in said.items()]
    lines = [*examples.splitlines(), "", "presets, of which one may come first:", *names]
    return "\n".join([about, "", *(f"  {line}" if line else "" for line in lines)])


def _short_help(presets: Mapping[str, Any], default: RunConfig, doc: str | None) -> str:
    """Return the text of --help: presets, common flags and how to list the others."""
    fields = type(default).model_fields
    common = [name for name in COMMON if name in fields]
    texts = {name: " ".join((fields[name].description or "").split()) for name in common}
    brief = {name: re.split(r"[.;:](?:\s|$)", text)[0] for name, text in texts.items()}
    rows = [f"  --{name.replace('_', '-'):15} {brief[name]} (default: {getattr(default, name)})" for name in common]
    groups = [name.replace("_", "-") for name, value in default if isinstance(value, Options)]
    more = f"--help all lists every flag, those of {', '.join(groups)} too"
    from_file = f"{CONFIG} FILE reads flags from a file"
    lines = [*_description(presets, doc).splitlines(), "", "common flags:", *rows, "", more, from_file]
    wrap = partial(textwrap.fill, width=shutil.get_terminal_size().columns, break_on_hyphens=False)
    return "".join(f"{wrap(line, subsequent_indent=(20 if line in rows else 4) * ' ')}\n" for line in lines)


def _print_help(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:  # --help | head
        exits.leave(EXIT_DONE)
    sys.exit(EXIT_DONE)
