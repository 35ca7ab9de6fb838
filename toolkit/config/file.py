"""A file of flags, `--config FILE`: YAML or JSON, keys as on the command line, groups nested or with a dot."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from toolkit.errors import UserError

NO_FLAGS = ("recipe", "data_identity")
"""Keys of a run's config.json beside its flags: the recipe's name, and what `toolkit.run.data` knows of the data."""


def flags_of_file(path: Path) -> list[tuple[str, list[str]]]:
    """Pairs of a flag and the words of its value, `("--optimizer.weight-decay", ["0.1"])`, in the order of the file.

    The config.json of a run is such a file; its `NO_FLAGS` are left out. Raises UserError for a file that can't be read
    or is no mapping.
    """
    import yaml

    try:
        text = path.expanduser().read_text(encoding="utf-8")
        if path.suffix == ".json":  # whose tabs YAML refuses
            text = json.dumps(json.loads(text))
        # Every scalar stays the word that was written: other loaders read `no` as false, and `1e-3` as no number.
        values = yaml.load(text, Loader=yaml.BaseLoader)
    except OSError as error:
        raise UserError(f"--config {path}: cannot be read ({error.strerror}): give a YAML or JSON file.") from None
    except (ValueError, yaml.YAMLError) as error:
        place = getattr(error, "problem_mark", None)
        line = getattr(error, "lineno", None) or (place.line + 1 if place else "1")
        raise UserError(f"--config {path}: line {line} is neither YAML nor JSON: correct it.") from None
    if not isinstance(values, dict):
        raise UserError(f"--config {path}: has no flags: write a line for each, such as `epochs: 3`.")
    return list(_flat({key: value for key, value in values.items() if key not in NO_FLAGS}))


def _flat(values: Mapping[str, Any], prefix: str = "--") -> Iterator[tuple[str, list[str]]]:
    for key, value in values.items():
        name = prefix + key.replace("_", "-")
        if isinstance(value, dict):
            yield from _flat(value, f"{name}.")
        else:
            words = value if isinstance(value, list) else [value]
            yield name, ["none" if word in ("null", "~", "") else str(word) for word in words]
