"""Flags of other programs, and what to use here instead: for the message about an unknown flag.

`docs/start/migration/` has the complete tables.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

NO_DEVICE = "a GPU is used if there is one; --cpu stays on the CPU"
LAUNCHER = "a launcher sets it in the environment: leave it out, or use --num-processes"

REMEDIES: Mapping[str, str] = {
    "accumulate-grad-batches": "use --gradient-accumulation-steps",
    "amp": "use --mixed-precision bf16, fp16 or no",
    "auto-batch-size": "leave it out: a run out of memory goes on from its checkpoint with smaller micro-batches",
    "backend": "it is NCCL on GPUs, and gloo with --cpu",
    "checkpoint-frequency": "use --checkpoint.every-steps",
    "cuda": NO_DEVICE,
    "device": NO_DEVICE,
    "early-stopping-patience": "use --early-stopping.patience",
    "expert-k": "use --top-k",
    "gpu-mode": NO_DEVICE,
    "gradient-clip": "use --optimizer.max-grad-norm",
    "learning-rate": "use --lr",
    "local-rank": LAUNCHER,
    "log-interval": "use --log-every",
    "master-addr": LAUNCHER,
    "multi-gpu": "use --num-processes 4; one process is the usual",
    "num-epochs": "use --epochs",
    "num-initial-experts": "use --experts",
    "pin-memory": "batches are pinned wherever there is a GPU: leave it out",
    "prefetch-factor": "use --num-workers",
    "rank": LAUNCHER,
    "save-dir": "use --run-dir",
    "sync-batchnorm": "convert the model with torch.nn.SyncBatchNorm",
    "timeout": "use --process-timeout, in minutes",
    "use-gradient-checkpointing": "use --recompute full",
    "weight-decay": "use --optimizer.weight-decay",
    "world-size": "use --num-processes, or a launcher",
}


def remedy_for(flag: str, known: Collection[str]) -> str | None:
    """Returns what to use instead of `flag`, as the end of a sentence.

    None for a flag of no program that we know, and where the `known` flags have none of those that it names.
    """
    name = flag.lstrip("-").replace("_", "-")
    text = REMEDIES.get(name) or REMEDIES.get(name.removeprefix("no-"))
    named = set(re.findall(r"--[a-z][\w.-]*", text or ""))
    return text if not named or named & set(known) else None
