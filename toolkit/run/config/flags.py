"""Fields and flags of a config by dotted name, such as `optimizer.weight_decay`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from operator import getitem
from typing import Any, TypeVar

from toolkit.experts.options import Options

C = TypeVar("C", bound=Options)


def flags_of(options: type[Options], prefix: str = "") -> dict[str, tuple[str, Any]]:
    """Return the name and type of the field of every flag; switches also have a `no-` form."""
    flags: dict[str, tuple[str, Any]] = {}
    for name, field in options.model_fields.items():
        hint: Any = field.annotation
        if isinstance(hint, type) and issubclass(hint, Options):
            flags |= flags_of(hint, f"{prefix}{name}.")
            continue
        for no in ("", "no-") if hint is bool else ("",):
            flags[f"--{prefix}{no}{name}".replace("_", "-")] = (prefix + name, hint)
    return flags


def replace_fields(config: C, changes: Mapping[str, Any]) -> C:
    """Return a copy of `config` with `changes`. Raises UserError for invalid values or combinations."""
    values = config.model_dump()
    for name, value in changes.items():
        *groups, last = name.split(".")
        reduce(getitem, groups, values)[last] = value
    return config.replace(**values)
