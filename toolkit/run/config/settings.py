"""Settings by dotted name: which decide what is learned, and in which of them runs differ."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

LENGTH = frozenset({"epochs", "max_steps"})
"""Fields that --extend may change."""
ONLY_OF_THE_SPEED = frozenset(
    {
        "profile",
        "compile",
        "dense_parallel",
        "fsdp_size",
        "ddp",
        "ep_size",
        "ep_stride",
        "exchange",
        "recompute",
        "replan",
        "spare_slots",
        "initial_placement",
        "record_traces",
    }
)
"""Fields that change how fast a run learns, and not what."""
NOT_OF_THE_TRAJECTORY = ONLY_OF_THE_SPEED | frozenset(
    {
        "auto_batch_size",  # only a command has it: the run that it starts has the batch that was found
        "run_dir",
        "storage",
        "resume",
        "resume_from",
        "extend",
        "tracker",
        "num_workers",
        "num_processes",
        "process_timeout",
        "on_nonfinite",
        "step_timeout",
        "max_restarts",
        "cpu",
        "log_every",
        "checkpoint",
        "data_dir",
        "data_identity",  # no field, but a key of config.json that `toolkit.run.data` compares
    }
)
"""Fields that may change when a run is resumed, because they do not change what is learned."""


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
