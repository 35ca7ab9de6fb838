"""What the doctor finds, and the findings that need no comparison of two runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """What is wrong."""

    name: str
    """A few words, the same for the same cause."""
    symptom: str
    cause: str
    remedy: str


OVERWRITTEN, REDECIDED = "experts overwritten by rank 0", "router decides otherwise under recomputation"
LOST = "micro-batch lost"


def recomputed_otherwise(error: str) -> Finding:
    """For a script that PyTorch's activation checkpointing ended, in several processes only."""
    return Finding(
        REDECIDED,
        error,
        "what is recomputed in the backward has other shapes than before: tokens went to other experts",
        "replay the first decision: use toolkit.moe.recompute.checkpoint, or keep the router outside of it",
    )


def out_of_step(places: Iterable[str]) -> Finding:
    """For a script whose ranks wait for each other for ever; `places` says where each of them is."""
    return Finding(
        "ranks out of step",
        f"processes waited for each other in vain: {'; '.join(places)}",
        "a rank skips a step, has fewer batches, or calls an operation between ranks that the others do not",
        "decide on all ranks together (reduce the decision first), and give all of them the same number of batches",
    )


def unrepeatable(check_names: Iterable[str]) -> Finding:
    """For a script that does not do the same twice in one process."""
    return Finding(
        "not repeatable",
        f"in one process, run twice, it differs in {', '.join(check_names)}",
        "something is drawn without a seed, or depends on time",
        "call accelerate.utils.set_seed first; until then nothing else that differs means anything",
    )
