"""The flags of a config, and the text of --help: from the fields of dataclasses and their docstrings."""

from __future__ import annotations

import ast
import dataclasses
import enum
import inspect
import textwrap
import types
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from toolkit.errors import UserError
from toolkit.run.config.choices import alternatives

COMMON = (
    "--epochs",
    "--batch-size",
    "--lr",
    "--seed",
    "--dataset",
    "--run-dir",
    "--num-processes",
    "--cpu",
    "--tracker",
    "--experts",
    "--planner",
)
"""Flags that come first in --help, where a recipe has them."""
CONFIG = "--config"
"""The flag that names a file of flags: of the command line, and no field of a config."""
FLAG_COLUMN, WIDTH = 26, 100


@dataclasses.dataclass(frozen=True)
class Flag:
    """A field of a config, or of a config nested in it, on the command line."""

    name: str
    """As it is typed: --optimizer.weight-decay."""
    hint: Any
    """Type of the value."""
    default: Any
    declared_in: type
    """The dataclass that has the field in its body."""

    @property
    def is_switch(self) -> bool:
        return self.hint is bool

    @property
    def off_name(self) -> str:
        """The flag that sets a switch to False: --lifecycle.no-merge."""
        group, dot, name = self.name[2:].rpartition(".")
        return f"--{group}{dot}no-{name}"

    @property
    def sentence(self) -> str:
        """The docstring of the field."""
        return _field_texts(self.declared_in)[self.name.rpartition(".")[2].lstrip("-").replace("-", "_")]

    def help_lines(self) -> list[str]:
        """The flag and its sentence, in two columns."""
        shown = " ".join(map(_shown, self.default)) if isinstance(self.default, tuple | list) else _shown(self.default)
        name = self.off_name if self.is_switch and self.default else self.name
        placeholder, choices = ("", "") if self.is_switch else _placeholder(self.hint)
        sentence = f"Switch off: {self.sentence}" if self.is_switch and self.default else self.sentence
        text = sentence if self.is_switch else f"{sentence}{choices} [{shown}]"
        lines = textwrap.wrap(text.strip(), WIDTH - FLAG_COLUMN, break_on_hyphens=False) or [""]
        column = f"  {name} {placeholder}".ljust(FLAG_COLUMN)
        if len(column) > FLAG_COLUMN or column[-1] != " ":
            return [column, *(" " * FLAG_COLUMN + line for line in lines)]
        return [column + lines[0], *(" " * FLAG_COLUMN + line for line in lines[1:])]


def flags_of(config: Any, prefix: str = "") -> Iterator[Flag]:
    """The flags of a config and of those nested in it, with the config's values as defaults."""
    hints = get_type_hints(type(config))
    declared_in = {name: cls for cls in reversed(type(config).__mro__) for name in inspect.get_annotations(cls)}
    for field in dataclasses.fields(config):
        name = field.name.replace("_", "-")
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from flags_of(value, f"{prefix}{name}.")
        else:
            yield Flag(f"--{prefix}{name}", hints[field.name], value, declared_in[field.name])


def value_types(config: Any) -> dict[str, Any]:
    """Every word that is a flag of `config`, and the type of its value: None for a switch, which takes no value.

    Raises UserError for a field of a type that no words are read as.
    """
    flags: dict[str, Any] = {}
    for flag in flags_of(config):
        if not _is_read(flag.hint):
            shown = flag.hint.__name__ if isinstance(flag.hint, type) else flag.hint
            remedy = "use bool, int, float, str, Path, Literal or an Enum, a tuple or list of one, or several with |"
            raise UserError(f"{flag.name}: a field of type {shown} cannot be a flag: {remedy}.")
        flags |= {flag.name: None, flag.off_name: None} if flag.is_switch else {flag.name: flag.hint}
    return flags


def takes_several(hint: Any) -> bool:
    """Whether a value of type `hint` may be several words."""
    return any(get_origin(part) in (tuple, list) for part in alternatives(hint))


def is_enum(hint: Any) -> bool:
    """Whether `hint` is an Enum, whose members are typed by name."""
    return isinstance(hint, type) and issubclass(hint, enum.Enum)


def _is_read(hint: Any) -> bool:
    return all(
        _is_word(part)
        or (get_origin(part) in (tuple, list) and all(_is_word(item) or item is ... for item in get_args(part)))
        for part in alternatives(hint)
    )


def _is_word(hint: Any) -> bool:
    return hint in (bool, int, float, str, Path, type(None)) or get_origin(hint) is Literal or is_enum(hint)


def _shown(value: Any) -> str:
    return "none" if value is None else value.name if isinstance(value, enum.Enum) else str(value)


def _placeholder(hint: Any) -> tuple[str, str]:
    """What stands for a value of type `hint` in --help, and the choices that follow the sentence, if any."""
    if get_origin(hint) in (Union, types.UnionType):
        pairs = [_placeholder(part) for part in alternatives(hint) if part is not type(None)]
        return "|".join(dict.fromkeys(name for name, _ in pairs)), "".join(choices for _, choices in pairs)
    if get_origin(hint) is Literal:
        return "NAME", f" ({', '.join(map(str, get_args(hint)))})"
    if is_enum(hint):
        return "NAME", f" ({', '.join(hint.__members__)})"
    if get_origin(hint) in (tuple, list):
        return f"{_placeholder(get_args(hint)[0])[0]} ...", ""
    return {bool: "true|false", int: "INT", float: "FLOAT", Path: "PATH"}.get(hint, "TEXT"), ""


@cache
def _field_texts(cls: type) -> dict[str, str]:
    """The docstrings under the fields in the body of `cls`."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    texts = {}
    for statement, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            found = after.value if isinstance(after, ast.Expr) else None
            texts[statement.target.id] = " ".join(str(found.value).split()) if isinstance(found, ast.Constant) else ""
    return texts


def first_paragraph(doc: str | None) -> str:
    return " ".join((doc or "").strip().partition("\n\n")[0].split())


def _heading(cls: type) -> str:
    """What stands above the flags of the fields in the body of `cls`; bases have headings of their own."""
    return str(vars(cls).get("help_heading") or first_paragraph(cls.__doc__))


def help_text(script: str, doc: str | None, presets: Mapping[str, Any], config: Any) -> str:
    """Usage, the recipe's sentence, presets and common flags; then the other flags by group, and examples."""
    width = max(map(len, presets))
    lines = [
        f"usage: python {script} [PRESET] [{CONFIG} FILE] [--flag value ...]",
        *textwrap.wrap(first_paragraph(doc), WIDTH),
        "",
        f"presets (default: {next(iter(presets))})",
        *(f"  {name:{width}}  {first_paragraph(build.__doc__)}" for name, build in presets.items()),
    ]
    flags = {flag.name: flag for flag in flags_of(config)}
    groups = {"common flags [default]": [flags[name] for name in COMMON if name in flags]}
    own = type(config)
    mro = type(config).__mro__
    for flag in sorted(flags.values(), key=lambda flag: (flag.declared_in not in mro, flag.declared_in is not own)):
        if flag.name not in COMMON:
            heading = "This recipe" if flag.declared_in is own else _heading(flag.declared_in)
            groups.setdefault(heading.rstrip("."), []).append(flag)
    for group, members in groups.items():
        lines += ["", group, *(line for flag in members for line in flag.help_lines())]
    if examples := (doc or "").strip().partition("\n\n")[2]:
        lines += ["", "examples", *(f"  {line}" for line in examples.splitlines())]
    return "\n".join(lines) + "\n"
