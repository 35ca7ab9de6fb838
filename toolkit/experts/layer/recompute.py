"""Activation checkpointing that routes a token once.

A checkpointed region runs again in the backward pass. A router that runs again can choose different experts, because of
a different kernel or a tie, so gradients would belong to other experts than outputs. So the forward pass of a region
records the decisions of each MoE layer (expert ids, dropped pairs, all-to-all sizes) and its recomputation reuses them:
rows are sent again, but counts are not exchanged again, and the routing log counts nothing again.

    y = checkpoint(block, x)      # instead of torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)

    # in transformers, with `toolkit.ExpertParallel`:
    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": replay_contexts})

A layer of your own that routes wraps its decisions in `decide`, as `toolkit.experts.layer.router` does, and counts
unless `replaying`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from toolkit.experts.compat import in_backward, in_reentrant_checkpoint, without_dynamo

Recompute = Literal["none", "selective", "full"]
Decision = TypeVar("Decision")


@dataclass(slots=True)
class _Tape:
    """The decisions of one region, in the order of its forward."""

    decisions: list[Any] = field(default_factory=list)
    next: int | None = None
    """Index of the next decision to reuse; None in the forward, which records them."""


# A plain global, because torch.compile breaks its graphs at a ContextVar. One thread at a time runs the model: where
# the backward has a thread of its own, the main one waits for it.
_current: _Tape | None = None


class _Running(AbstractContextManager[None]):
    """A context in which decisions are recorded on a tape or reused. Each backward of a region enters it again."""

    def __init__(self, tape: _Tape, start: int | None):
        self.tape, self.start = tape, start

    def __enter__(self) -> None:
        global _current
        self.tape.next, self.outer = self.start, _current
        _current = self.tape

    def __exit__(self, *error: object) -> None:
        global _current
        _current = self.outer


@without_dynamo
def checkpoint(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`fn(*args, **kwargs)`, whose activations are recomputed in the backward with the decisions of the forward.

    Random numbers are the same both times, as with PyTorch's. Inside another such region it only calls `fn`. A compiled
    model runs a region uncompiled, because `torch.compile` does not support `context_fn`.
    """
    if not torch.is_grad_enabled() or in_region():
        return fn(*args, **kwargs)
    return torch_checkpoint(fn, *args, use_reentrant=False, context_fn=replay_contexts, **kwargs)


def replay_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """A `context_fn` for `torch.utils.checkpoint.checkpoint`, if it is not called through `checkpoint` of this file."""
    tape = _Tape()
    return _Running(tape, None), _Running(tape, 0)


def in_region() -> bool:
    """Whether this is the forward of a region, or its recomputation."""
    return _current is not None


def replaying() -> bool:
    """Whether a region of this file is being recomputed."""
    return _current is not None and _current.next is not None


def recomputing() -> bool:
    """Whether any checkpointed region is being recomputed in a backward, PyTorch's own included: count nothing then."""
    return not torch.compiler.is_compiling() and in_backward()


@without_dynamo
def in_reentrant_forward() -> bool:
    """Whether a region of PyTorch's reentrant checkpointing runs its forward, without gradients."""
    return not recomputing() and in_reentrant_checkpoint()


def decide(make: Callable[[], Decision]) -> Decision:
    """Return `make()`; in the recomputation of a region, its result of the forward pass.

    It must not return tensors that require gradients: region and graph would keep each other alive.
    """
    tape = _current
    if tape is None:
        return make()
    if tape.next is None:
        tape.decisions.append(make())
        return tape.decisions[-1]
    tape.next += 1
    return tape.decisions[tape.next - 1]
