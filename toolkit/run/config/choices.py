"""The words that fields of Literal types may be, which a dataclass by itself does not look at."""

from __future__ import annotations

import inspect
import types
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin

from toolkit.errors import UserError


def alternatives(hint: Any) -> tuple[Any, ...]:
    """The types of a union, with NoneType where None is one of them; else `hint` alone."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def require_choices(config: Any, prefix: str = "") -> None:
    """Raise UserError where a field of a Literal type has another value; names in it begin with `prefix`."""
    cls: type = type(config)
    for name, choices in _choices(cls).items():
        value = getattr(config, name)
        words = ", ".join("none" if choice is None else str(choice) for choice in choices)
        if value not in choices:
            raise UserError(f"--{(prefix + name).replace('_', '-')} {value}: take one of {words}.")


@cache
def _choices(cls: type) -> Mapping[str, tuple[Any, ...]]:
    """What the fields of Literal types may be, None included where they may be that."""
    found: dict[str, tuple[Any, ...]] = {}
    for base in reversed(cls.__mro__):
        try:
            hints: dict[str, Any] = inspect.get_annotations(base, eval_str=True)
        except NameError:  # a user's own config, with a type that is imported for type checkers only
            continue
        for name, hint in hints.items():
            parts = alternatives(hint)
            choices = [choice for part in parts if get_origin(part) is Literal for choice in get_args(part)]
            found.pop(name, None)
            if choices:
                found[name] = (*choices, None) if type(None) in parts else tuple(choices)
    return found
