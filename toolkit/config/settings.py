"""Settings by dotted name: which decide what is learned, and in which of them runs differ."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from toolkit.config.run import NOT_OF_THE_TRAJECTORY


def leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested mappings by dotted name, such as `optimizer.weight_decay`."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def differing_names(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names whose values, JSON's, differ between the mappings. One that a mapping lacks is no difference: a later
    version may have added it."""
    names = dict.fromkeys(name for values in found for name in values)
    return [name for name in names if len({json.dumps(values[name]) for values in found if name in values}) > 1]


def decides_what_is_learned(setting: str) -> bool:
    """Whether training results depend on `setting`, a name of config.json or a dotted one."""
    return setting.partition(".")[0] not in NOT_OF_THE_TRAJECTORY
