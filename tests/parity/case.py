"""Cases of the comparison with one process: a model, a training loop, a layout, an optimizer and habits of the loop.

`CASES` covers each pair of values that can be combined, and has the combinations that failed once. A new model, layout,
optimizer or habit is a row of its table; the cases that cover it follow.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from tests.parity.layouts import LAYOUTS, MORE_LAYOUTS, Layout
from tests.parity.models import MODELS, OF_TRANSFORMERS, WITH_MOE_LAYERS
from tests.parity.optimizers import OPTIMIZERS

LOOPS = ("ExpertParallel", "Trainer", "torch only", "expert_trainer")
CHECKPOINTING: dict[str, bool | None] = {"none": None, "non-reentrant": False, "reentrant": True}
"""Kinds of activation checkpointing: the value of `use_reentrant`."""


@dataclass(frozen=True)
class Case:
    """One training run."""

    model: str = "our MoE"
    loop: str = "ExpertParallel"
    layout: str = "EP 2"
    optimizer: str = "AdamW"
    accumulation: int = 1
    """Micro-batches per step. A step has fewer samples than the others, and with `expert_trainer` fewer
    micro-batches."""
    checkpointing: str = "none"
    clipping: bool = True
    frozen: bool = False
    """Freezes the embedding and one parameter of the first layer's experts."""
    groups: bool = False
    """Trains experts in a parameter group of their own, with another learning rate and weight decay."""
    scheduler: bool = False
    evaluation: bool = False
    """Evaluates after each step, with unequal batches if the loop supports them."""
    penalty: bool = False
    """Adds a load-balancing loss and a router z-loss, with `Trainer` over all micro-batches of a step."""
    resume: bool = False
    """Saves after the second step, and continues with a new model, optimizer and placement."""
    dtype: torch.dtype = torch.float64

    def __str__(self) -> str:
        return ", ".join([self.model, self.loop, self.layout, self.optimizer, *self.habits])

    @property
    def habits(self) -> Iterator[str]:
        """Names of the habits of this case."""
        if self.accumulation > 1:
            yield "accumulation"
        if self.checkpointing != "none":
            yield f"{self.checkpointing} checkpointing"
        yield from (name for name in SWITCHES if getattr(self, name))
        if self.dtype is not torch.float64:
            yield str(self.dtype).removeprefix("torch.")

    @property
    def ranks(self) -> Layout:
        return (LAYOUTS | MORE_LAYOUTS)[self.layout]

    @property
    def reference(self) -> Case:
        """The case of one process with the same numbers, without checkpointing and resume."""
        loop = "ExpertParallel" if self.loop == "torch only" else self.loop  # the same order of samples
        return replace(self, loop=loop, layout="1 process", checkpointing="none", resume=False)


SWITCHES = tuple(field.name for field in fields(Case) if isinstance(field.default, bool))

VALUES: dict[str, list[Any]] = {
    "model": list(MODELS),
    "loop": list(LOOPS),
    "layout": list(LAYOUTS),
    "optimizer": list(OPTIMIZERS),
    "accumulation": [1, 2],
    "checkpointing": list(CHECKPOINTING),
    **{name: [False, True] for name in SWITCHES},
}
"""The values of each field of a case that are combined in pairs."""
HABITS = ("accumulation", "checkpointing", *SWITCHES)


def _is_plain(layout: str) -> bool:
    return LAYOUTS[layout].ranks == "neighbours" and LAYOUTS[layout].nodes == 1


UNSUPPORTED: list[tuple[str, tuple[str, ...], Callable[..., bool]]] = [
    (
        "`expert_trainer` takes `ep_size`, but no `groups`.",
        ("loop", "layout"),
        lambda loop, layout: loop == "expert_trainer" and not _is_plain(layout),
    ),
    (
        "transformers' Trainer saves models of transformers only.",
        ("loop", "model", "resume"),
        lambda loop, model, resume: loop == "expert_trainer" and resume and model not in OF_TRANSFORMERS,
    ),
    (
        "FSDP2 does not shard optimizer states that exist before the first step (Adagrad).",
        ("optimizer", "layout"),
        lambda optimizer, layout: optimizer == "Adagrad" and LAYOUTS[layout].dense == "fsdp2",
    ),
    (
        "Fused optimizers of torch take no experts without shards in a group with shards of FSDP2.",
        ("optimizer", "loop", "layout"),
        lambda optimizer, loop, layout: (
            "fused" in optimizer
            and loop == "torch only"
            and (LAYOUTS[layout].dense, LAYOUTS[layout].world) == ("fsdp2", 2)
        ),
    ),
    (
        "The penalty is for layers of `make_moe`.",
        ("model", "penalty"),
        lambda model, penalty: penalty and model not in WITH_MOE_LAYERS,
    ),
    (
        "The penalty needs gradients, which reentrant checkpointing does not record in the forward pass.",
        ("checkpointing", "penalty"),
        lambda kind, penalty: penalty and kind == "reentrant",
    ),
    (
        "`expert_trainer` makes a penalty for models of transformers only.",
        ("loop", "penalty"),
        lambda loop, penalty: loop == "expert_trainer" and penalty,
    ),
    (
        "A capacity holds for a micro-batch, and the penalty of `Trainer` for a step.",
        ("model", "loop", "penalty"),
        lambda model, loop, penalty: model == "top-1, capacity" and loop == "Trainer" and penalty,
    ),
    ("Muon has its own parameter groups.", ("optimizer", "groups"), lambda name, groups: name == "Muon" and groups),
    (
        "DDP supports one call of a layer per forward pass with reentrant checkpointing.",
        ("model", "checkpointing"),
        lambda model, kind: model == "one layer, 3 calls" and kind == "reentrant",
    ),
]
"""Values that cannot be combined: the reason, the fields, and the condition."""


def is_supported(chosen: dict[str, Any]) -> bool:
    """Return whether no reason speaks against the values that are `chosen` so far."""
    return not any(
        condition(*(chosen[name] for name in names))
        for _, names, condition in UNSUPPORTED
        if chosen.keys() >= set(names)
    )


def pairs_of(chosen: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    return itertools.combinations([(name, chosen[name]) for name in VALUES if name in chosen], 2)


def supported_pairs() -> Iterator[tuple[Any, Any]]:
    for a, b in itertools.combinations(VALUES, 2):
        for pair in itertools.product([(a, x) for x in VALUES[a]], [(b, y) for y in VALUES[b]]):
            if is_supported(dict(pair)):
                yield pair


def pairwise() -> list[Case]:
    """Return cases that cover each supported pair of values.

    Greedy and deterministic: each case starts with a pair that is not covered yet, and takes for each other field the
    value that covers most of the remaining pairs. Of these, it takes the least used value, and with four processes,
    which are slow, the first value of a habit.
    """
    remaining = dict.fromkeys(supported_pairs())
    cases: list[Case] = []
    taken: Counter[tuple[str, Any]] = Counter()
    while remaining:
        chosen = dict(next(iter(remaining)))
        for name in VALUES:
            if name not in chosen:
                options = [each for value in VALUES[name] if is_supported(each := {**chosen, name: value})]
                gains = [sum(pair in remaining for pair in pairs_of(each)) for each in options]
                is_slow = "layout" in chosen and LAYOUTS[chosen["layout"]].world > 2
                order = range(len(options)) if is_slow and name in HABITS else [taken[name, e[name]] for e in options]
                chosen = max(zip(gains, order, options, strict=True), key=lambda each: (each[0], -each[1]))[2]
        cases.append(Case(**chosen))
        taken.update(chosen.items())
        for pair in pairs_of(chosen):
            remaining.pop(pair, None)
    return cases


SINGLE = [
    Case("own experts", "ExpertParallel", "EP 2, one rank", accumulation=2),
    Case("Qwen3-MoE", "expert_trainer", "EP 4, moving replicas", "Lion"),
    Case("tied weights", "Trainer", "EP 4, moving replicas", accumulation=2, resume=True),
    Case("shared expert", "Trainer", "EP 4, 2 nodes", accumulation=2, resume=True),
    Case("own experts", "torch only", "EP 4, 2 nodes", "Nesterov", checkpointing="reentrant"),
    Case("shared expert", "ExpertParallel", "EP 2 of 4, moves, HSDP", "Muon", accumulation=2, resume=True),
    Case("shared expert", "ExpertParallel", "EP 4 of 8, 4 nodes", accumulation=2, evaluation=True),
    Case("DeepSeek-V3", "Trainer", "EP 4 of 8, 4 nodes", frozen=True),
    Case("own experts", "ExpertParallel", "shards 2", accumulation=2, resume=True),
    Case("our MoE", "Trainer", "shards 2", frozen=True, penalty=True),
    Case("shared expert", "Trainer", "EP 2 x shards 2, HSDP", "Muon", accumulation=2, penalty=True),
    Case("tied weights", "ExpertParallel", "EP 2 x shards 2, moves", groups=True, resume=True),
    Case(
        "our MoE",
        "ExpertParallel",
        "EP 2 x shards 2 x replicas 2",
        accumulation=2,
        checkpointing="non-reentrant",
        frozen=True,
        groups=True,
        resume=True,
    ),
    Case(
        "Qwen3-MoE",
        "Trainer",
        "EP 2 x shards 2 x replicas 2",
        "Muon",
        checkpointing="reentrant",
        scheduler=True,
        evaluation=True,
    ),
    Case("Qwen3-MoE", "expert_trainer", "EP 2 x shards 2 x replicas 2", accumulation=2, evaluation=True, resume=True),
    Case("shared expert", "Trainer", "EP 4 x shards 2", accumulation=2, penalty=True, resume=True),
    Case(
        "own experts",
        "ExpertParallel",
        "EP 4 x shards 2",
        "Nesterov",
        checkpointing="non-reentrant",
        frozen=True,
        scheduler=True,
        evaluation=True,
    ),
    Case("own experts", "ExpertParallel", "EP 2, moves, FSDP2", dtype=torch.float32),
    Case("our MoE", "ExpertParallel", "EP 2, replicas", dtype=torch.bfloat16),
    Case("our MoE", "ExpertParallel", "EP 4, moving replicas", dtype=torch.float32, accumulation=2),
    Case("Qwen3-MoE", "ExpertParallel", "shards 2", dtype=torch.bfloat16),
    Case("own experts", "ExpertParallel", "EP 2, moves, FSDP2", dtype=torch.bfloat16),
    Case("own experts", "ExpertParallel", "shards 2", dtype=torch.bfloat16),
]
"""Cases of layouts and precisions that are not combined with everything, and cases that failed once."""

CASES = [*pairwise(), *SINGLE]
