"""A file of flags, `--config FILE`: YAML or JSON, keys as on the command line, groups nested or with a dot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from toolkit.errors import UserError, one_line

CONFIG = "--config"
"""Command-line flag of a file of flags; not a field of a config."""
NO_FLAGS = ("recipe", "data_identity")
"""Keys of config.json that are not flags: the recipe name, and the data identity of `toolkit.run.data`."""


def words_of_file(path: Path, flags: Mapping[str, Any]) -> list[str]:
    """Return the flags and values in the file as command-line words, `--optimizer.weight-decay 0.1`.

    The config.json of a run is also supported, without its `NO_FLAGS`.

    Args:
        path: The file.
        flags: Known flags with their types; `bool` is a switch.

    Raises:
        UserError: If the file is not a YAML or JSON mapping, or a value has the wrong form.
    """
    import yaml

    if path.expanduser().exists() and not path.expanduser().is_file():
        raise UserError("is not a regular file. Give a file of flags.")  # a pipe would block
    try:
        # Keep every scalar as written: YAML would read `no` as false and `1e-3` as a string. JSON is YAML except for
        # tabs, which in JSON occur only between tokens.
        text = path.expanduser().read_text(encoding="utf-8-sig").replace("\t", " ")
        values = yaml.load(text, Loader=yaml.BaseLoader)
    except (ValueError, yaml.YAMLError) as error:
        raise UserError(f"is neither YAML nor JSON ({one_line(error)}). Correct it.") from None
    if not isinstance(values, dict):
        raise UserError("has no flags. Write a line for each, such as `epochs: 3`.")
    words: list[str] = []
    for flag, value in _flat({key: value for key, value in values.items() if key not in NO_FLAGS}):
        items = value if isinstance(value, list) else [value]
        if any(not isinstance(item, str) for item in items):
            raise UserError(f"{flag}: is a list or group within a list. Write its values in one list.")
        if flags.get(flag) is bool:
            words.append(_switch(flag, " ".join(items)))
        else:
            may_be_none = type(None) in get_args(flags.get(flag))
            words += [flag, *("none" if may_be_none and item in ("null", "~", "") else item for item in items)]
    return words


def _switch(flag: str, value: str) -> str:
    if value.lower() not in ("true", "false"):
        raise UserError(f"{flag} {value}: take true or false.")
    group, dot, name = flag.removeprefix("--").rpartition(".")
    return flag if value.lower() == "true" else f"--{group}{dot}no-{name}"


def _flat(values: Mapping[str, Any], prefix: str = "--") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        name = prefix + str(key).replace("_", "-")
        if isinstance(value, dict):
            yield from _flat(value, f"{name}.")
        else:
            yield name, value
