"""Flags of a config, and their spelling in messages."""

from __future__ import annotations

import re
from typing import Any

from toolkit.experts.options import Options


def flags_of(options: type[Options], prefix: str = "--") -> dict[str, Any]:
    """Return every flag of a config with the type of its field; switches also with their `no-` form."""
    flags: dict[str, Any] = {}
    for name, field in options.model_fields.items():
        hint: Any = field.annotation
        word = name.replace("_", "-")
        if isinstance(hint, type) and issubclass(hint, Options):
            flags |= flags_of(hint, f"{prefix}{word}.")
            continue
        flags[f"{prefix}{word}"] = hint
        if hint is bool:
            flags[f"{prefix}no-{word}"] = hint
    return flags


def as_typed(sentence: object, config: Options | None) -> str:
    """Replace fields of `config` in `sentence` by flags: `ep_size=3` by `--ep-size 3`."""
    fields = {} if config is None else {flag[2:].replace("-", "_"): flag for flag in flags_of(type(config))}

    def flag(found: re.Match[str]) -> str:
        name, value = found[1], found[2].strip("'")
        known = name if name in fields else next((full for full in fields if full.endswith(f".{name}")), None)
        if known is None:
            return found[0]
        group, dot, last = fields[known][2:].rpartition(".")
        switch = {"True": f"--{group}{dot}{last}", "False": f"--{group}{dot}no-{last}"}
        return switch.get(value) or f"{fields[known]} {'none' if value == 'None' else value}"

    return re.sub(r"\b([a-z][\w.]*)=('[^']*'|\([^)]*\)|\S+?)(?=[.,:;)]*(?:\s|$))", flag, str(sentence))
