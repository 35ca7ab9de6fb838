"""Activation checkpointing that does not decide twice.

A checkpointed region forgets its activations and runs again in the backward. A router that runs again may decide
otherwise: another kernel, a tie, and tokens go where their gradients do not. So the first forward of a region notes
what each MoE layer decided (experts, what was dropped, who sends how much to whom), and the second takes it from there:
rows are sent again, counts are neither exchanged nor counted again.

    y = checkpoint(block, x)      # in place of torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)

    # and where transformers calls it, with experts spread by `toolkit.moe.ExpertParallel`:
    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": replay_contexts})

For those who write layers: `in_region`, `replaying` and `decide`, as `toolkit.moe.router` and `layer` use them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

Recompute = Literal["none", "selective", "full"]
Decision = TypeVar("Decision")


@dataclass(slots=True)
class _Tape:
    """What was decided in one region, in the order of its forward."""

    decisions: list[Any] = field(default_factory=list)
    next: int | None = None
    """Which decision comes next; None while the first forward makes them."""


# A plain global, because torch.compile breaks its graphs at a ContextVar. One thread at a time runs the model: where
# the backward has a thread of its own, the main one waits for it.
_current: _Tape | None = None


class _Running(AbstractContextManager[None]):
    """While it is entered, decisions go to a tape or come from it. Each backward through a region enters it again."""

    def __init__(self, tape: _Tape, start: int | None):
        self.tape, self.start = tape, start

    def __enter__(self) -> None:
        global _current
        self.tape.next, self.outer = self.start, _current
        _current = self.tape

    def __exit__(self, *error: object) -> None:
        global _current
        _current = self.outer


@torch.compiler.disable
def checkpoint(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`fn(*args, **kwargs)`, whose activations are recomputed in the backward with the decisions of the forward.

    Random draws are the same both times, as with PyTorch's own. Inside another such region it adds nothing. A compiled
    model runs a region uncompiled, because `torch.compile` refuses regions with contexts of their own.
    """
    if not torch.is_grad_enabled() or in_region():
        return fn(*args, **kwargs)
    return torch_checkpoint(fn, *args, use_reentrant=False, context_fn=replay_contexts, **kwargs)


def replay_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """For the `context_fn` of PyTorch's own `checkpoint`, where others call it: what makes a region one of these."""
    tape = _Tape()
    return _Running(tape, None), _Running(tape, 0)


def in_region() -> bool:
    """Whether this is a region's first or second forward."""
    return _current is not None


def replaying() -> bool:
    """Whether this is a region's second forward."""
    return _current is not None and _current.next is not None


def recomputing() -> bool:
    """Whether this is a forward for the second time, in the backward of a checkpointed region: not to be counted."""
    return torch._C._current_graph_task_id() != -1


def decide(make: Callable[[], Decision]) -> Decision:
    """What `make` decides; in a region's second forward what it decided in the first.

    A decision holds no tensor with a gradient, or region and graph would keep each other alive.
    """
    tape = _current
    if tape is None:
        return make()
    if tape.next is None:
        tape.decisions.append(make())
        return tape.decisions[-1]
    tape.next += 1
    return tape.decisions[tape.next - 1]
