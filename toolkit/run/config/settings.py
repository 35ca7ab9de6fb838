"""Settings by dotted name: settings that affect results, and settings that differ between runs."""

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
"""Fields that change the speed of a run and not its results."""
NOT_OF_THE_TRAJECTORY = ONLY_OF_THE_SPEED | frozenset(
    {
        "auto_batch_size",  # only for commands: the run itself has the batch size that was found
        "run_dir",
        "storage",
        "resume",
        "resume_from",
        "extend",
        "tracker",
        "project",
        "run_name",
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
        "data_identity",  # not a field: a key of config.json that `toolkit.run.data` compares
    }
)
"""Fields that can change when a run is resumed, because they do not affect results."""


def leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings by dotted name, such as `optimizer.weight_decay`."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def differing_names(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names with different JSON values in the mappings. Missing names do not differ: a later version can
    have added them."""
    names = dict.fromkeys(name for values in found for name in values)
    return [name for name in names if len({json.dumps(values[name]) for values in found if name in values}) > 1]


def decides_what_is_learned(setting: str) -> bool:
    """Return whether training results depend on `setting`, a name of config.json or a dotted name."""
    return setting.partition(".")[0] not in NOT_OF_THE_TRAJECTORY
