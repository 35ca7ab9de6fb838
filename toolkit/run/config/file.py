"""A file of flags, `--config FILE`: YAML or JSON, keys as on the command line, groups nested or with a dot."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from toolkit.errors import UserError, did_you_mean, one_line
from toolkit.run.config.flags import OF_GUIDES
from toolkit.run.config.settings import leaves

CONFIG = "--config"
"""Command-line flag of a file of flags; not a field of a config."""
LARGEST = 2**20
"""Characters of a file of flags."""
NO_FLAGS = ("recipe", "data_identity")
"""Keys of config.json that are not flags: the recipe name, and the data identity of `toolkit.run.data`."""


def read_file(path: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values in the file by dotted name, as text that the options convert and check.

    The config.json of a run is also supported, without its `NO_FLAGS`.

    Args:
        path: The file.
        fields: Known fields with their types.

    Raises:
        UserError: If the file is not a YAML or JSON mapping, or has an unknown key.
    """
    import yaml

    if path.expanduser().exists() and not path.expanduser().is_file():
        raise UserError("is not a regular file. Give a file of flags.")  # a pipe would block
    try:
        # Keep every scalar as written: YAML would read `no` as false and `1e-3` as a string. JSON is YAML except for
        # tabs, which in JSON occur only between tokens.
        text = path.expanduser().read_text(encoding="utf-8-sig").replace("\t", " ")
        if len(text) > LARGEST:
            raise ValueError(f"it has {len(text):,} characters")
        values = yaml.load(text, Loader=yaml.BaseLoader)
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=yaml.BaseLoader)):
            raise ValueError("aliases are not supported")  # nested ones expand without bound
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"is neither YAML nor JSON ({one_line(error)}). Correct it.") from None
    if not isinstance(values, dict):
        raise UserError("has no flags. Write a line for each, such as `epochs: 3`.")
    changes: dict[str, Any] = {}
    for key, value in leaves({key: value for key, value in values.items() if key not in NO_FLAGS}):
        name = key.replace("-", "_")
        if name not in fields:
            ours = OF_GUIDES.get(name.replace("_", "-"), name).replace("-", "_")
            raise UserError(f"{name}: there is no such option. {did_you_mean(ours, fields, 'See --help all.')}")
        may_be_none = type(None) in get_args(fields[name])
        changes[name] = None if may_be_none and value in ("none", "None", "null", "~", "") else value
    return changes
