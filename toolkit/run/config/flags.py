"""Fields and flags of a config by dotted name, such as `optimizer.weight_decay`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from operator import getitem
from typing import Any, TypeVar

from toolkit.experts.options import Options

C = TypeVar("C", bound=Options)

OF_GUIDES = {
    "accumulation-steps": "gradient-accumulation-steps",
    "alpha-values": "supervision-weight",
    "checkpoint-frequency": "checkpoint.every-steps",
    "compile-mode": "compile",
    "dormant-steps-threshold": "lifecycle.min-age",
    "enable-adaptive-sleep": "lifecycle.min-sleep-every",
    "enable-dynamic-experts": "max-experts",
    "enable-sleep": "lifecycle.sleep-every",
    "eval-frequency": "eval-every",
    "expert-creation-uncertainty-threshold": "lifecycle.plateau-threshold",
    "expert-k": "top-k",
    "expert-similarity-threshold": "lifecycle.merge-similarity",
    "fp16-compression": "ddp.comm-hook",
    "grad-accum-steps": "gradient-accumulation-steps",
    "learning-rate": "lr",
    "log-every-n-steps": "log-every",
    "log-interval": "log-every",
    "memory-buffer-size": "lifecycle.memory-size",
    "memory-replay-batch-size": "batch-size",
    "min-lifetime-activations": "lifecycle.prune-below",
    "min-sleep-frequency": "lifecycle.min-sleep-every",
    "multi-gpu": "num-processes",
    "name": "run-name",
    "no-amp": "mixed-precision",
    "no-multi-gpu": "num-processes",
    "nproc-per-node": "num-processes",
    "num-epochs": "epochs",
    "num-initial-experts": "experts",
    "num-style": "style-dim",
    "parallel-strategy": "ep-size",
    "precision-type": "mixed-precision",
    "profile-every-n-steps": "profile",
    "recovery-timeout": "process-timeout",
    "replay-learning-rate": "lifecycle.replay-lr",
    "save-dir": "run-dir",
    "sleep-cycle-frequency": "lifecycle.sleep-every",
    "sync-batchnorm": "sync-bn",
    "timeout": "process-timeout",
    "use-fp16-allreduce": "ddp.comm-hook",
    "use-gradient-as-bucket-view": "ddp.gradient-as-bucket-view",
    "use-gradient-checkpointing": "recompute",
    "world-size": "num-processes",
}
"""Flags by the words of the guides in docs/start/migration."""


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
