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

SEEN: dict[str, tuple[str, str, str, str, str]] = {
    "owned rows after prepare": (
        "overwritten",
        OVERWRITTEN,
        "preparing the model changed rows that a rank owns: {}",
        "DDP treated them as replicated and broadcast rank 0's; it averages their gradients too",
        "prepare with ExpertParallel.prepare, the Trainer, or toolkit.experts.parallel.prepare.prepare",
    ),
    "one routing decision": (
        "redecided",
        REDECIDED,
        "the forward that activation checkpointing repeats sent tokens elsewhere in {}",
        "the router draws or reads something that has changed since the first forward (noise, a bias, a counter)",
        "replay the first decision: keep the router outside of the recomputed part, or draw with a preserved seed",
    ),
    "all micro-batches": (
        "lost_micro_batches",
        LOST,
        "the gradients of one micro-batch were gone when that of the next began, with no update between them: {}",
        "gradients are set to zero, or written over, between micro-batches",
        "set them to zero after the optimizer's step alone, and let backward add to them",
    ),
    "buffers of ranks": (
        "overwritten_buffers",
        "buffer overwritten by broadcast",
        "before a forward, ranks lost what they had written to {}",
        "DDP broadcasts rank 0's buffers before each forward",
        "keep what each rank counts in a plain attribute, or reduce it over the ranks first",
    ),
    "parameters in an optimizer": (
        "outside",
        "parameter outside the optimizer",
        "no optimizer holds {}, so it never moves",
        "the optimizer was made before the parameter, or from a part of the model",
        "make the optimizer last, from model.parameters(), or set requires_grad to False",
    ),
    "adapters that learn": (
        "frozen_adapters",
        "adapter frozen",
        "{} is zero and does not learn, so an active adapter changes nothing",
        "it was frozen after PEFT made it, or loaded without is_trainable=True",
        "set requires_grad to True before the optimizer is made, or leave the adapter out",
    ),
    "balance loss in the backward": (
        "unused_losses",
        "balance loss without effect",
        "the backward did not reach the {} that the model returns",
        "it is not part of the loss, or what was to inject its gradient is not part of the graph",
        "add it to the loss, and use the tensor that an autograd function returns",
    ),
    "order of epochs": (
        "repeated_orders",
        "every epoch in the same order",
        "a {} went through its data again in the order of the epoch before",
        "the sampler draws its order from the number of the epoch, and was not told that it has changed",
        "call sampler.set_epoch(epoch) before each epoch, or let Accelerate prepare the data loader",
    ),
}
"""What a rank sees by itself: a quantity -> the list in its `Record` that is to be empty, and name, symptom (with what
is in the list), cause and remedy of the finding; in causal order."""


def recomputed_otherwise(error: str) -> Finding:
    """For a script that PyTorch's activation checkpointing ended, in several processes only."""
    return Finding(
        REDECIDED,
        error,
        "what is recomputed in the backward has other shapes than before: tokens went to other experts",
        "replay the first decision: use toolkit.experts.layer.recompute.checkpoint, or keep the router outside of it",
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
