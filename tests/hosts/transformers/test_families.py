"""Every family trains with its experts spread as it does on one process, and is saved as ordinary weights.

Three clipped AdamW steps in float64, from scratch and from saved weights, under DDP, with experts anywhere. Each world
runs all of its cases in one launch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.equality import assert_equal_rows
from tests.helpers import run_distributed
from tests.hosts.transformers.families import EXPERTS, FAMILIES, awaken, config, tokens
from toolkit.errors import UserError
from toolkit.hosts.transformers import (
    causal_lm,
    experts_modules,
    save_pretrained,
    use_toolkit_kernel,
    watch_routers,
)
from toolkit.moe.losses import RouterPenalty
from toolkit.parallel.ownership import EMPTY_ROW, ownership_of
from toolkit.placement.placement import ExpertPlacement

STEPS, SAMPLES = 3, 8
ORDER = (5, 0, 7, 2, 6, 1, 4, 3)

Case = tuple[int, int, str, str, str, str]
"""(processes, ep_size, family, weights, placement, experts_implementation)."""

CASES: list[Case] = [(2, 2, family, "scratch", "permuted", "eager") for family in FAMILIES]
CASES += [(4, 4, family, "saved", "permuted", "batched_mm") for family in FAMILIES]
CASES += [(4, 2, family, "scratch", "permuted", "toolkit") for family in FAMILIES]
CASES += [(2, 2, "gpt_oss", "saved", "uneven", "toolkit"), (4, 4, "qwen3_moe", "saved", "copies", "batched_mm")]


def place(name: str, ranks: int) -> ExpertPlacement:
    """Equal counts in any order; five experts on rank 0; a copy of expert 3 on each rank that has none."""
    if name == "uneven":
        return ExpertPlacement((ORDER[:5], ORDER[5:]))
    permuted = ExpertPlacement.from_slot_of_expert(ORDER, ranks)
    if name == "copies":
        return ExpertPlacement(tuple((*row, EMPTY_ROW if 3 in row else 3) for row in permuted.slots))
    return permuted


def by_expert(name: str, parameter: nn.Parameter, value: Tensor) -> dict[str, Tensor]:
    """`value`, a parameter or its gradient, under names that do not depend on where experts live."""
    ownership = ownership_of(parameter)
    if ownership is None:
        return {f"{name}/{row}": each.clone() for row, each in enumerate(value)} if _is_stacked(name) else {name: value}
    held = zip(ownership.row_ids, ownership.owns, value, strict=True)
    return {f"{name}/{row_id}": each.clone() for row_id, owned, each in held if owned}


def _is_stacked(name: str) -> bool:
    return ".experts." in name


def rows(model: nn.Module, *, grads: bool = False) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        value = parameter.grad if grads else parameter.detach()
        if value is None:  # an expert without tokens, on one process
            value = torch.zeros_like(parameter)
        found |= by_expert(name, parameter, value.clone())
    return found


def train(folder: Path, case: Case) -> dict[str, Any]:
    from accelerate import Accelerator

    from toolkit.hosts.engine import ExpertParallel

    world, ep_size, family, weights, placement, implementation = case
    torch.manual_seed(0)
    source = folder / family if weights == "saved" else config(family)
    model: Any = causal_lm(source, dtype=torch.float64, experts_implementation=implementation)
    if weights == "scratch":
        awaken(model)
    penalty = RouterPenalty(watch_routers(model), balance_weight=0.5, z_weight=0.1)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    accelerator: Any = Accelerator(cpu=True)
    inner, rank = model, accelerator.process_index
    if world > 1:
        experts = ExpertParallel(accelerator, ep_size=ep_size, placement=lambda *_: place(placement, ep_size))
        model, optimizer = experts.prepare(model, optimizer)
    losses, norms, grads, loads = [], [], [], []
    for step in range(STEPS):
        ids = tokens(step, SAMPLES)[rank * SAMPLES // world : (rank + 1) * SAMPLES // world]
        loss = model(input_ids=ids, labels=ids).loss + world * penalty()
        loads.append(torch.stack([watch.last_load_E for watch in penalty.layers]))
        accelerator.backward(loss)
        grads.append(rows(inner, grads=True))
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.3)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    if world > 1:
        with pytest.raises(UserError, match="of one rank only"):
            inner.save_pretrained(folder / "one rank's")
    saved = folder / "-".join(map(str, case))
    save_pretrained(model, saved)
    if world > 1:
        dist.barrier()
    return {
        "losses": losses,
        "norms": norms,
        "grads": grads,
        "weights": rows(inner),
        "load": torch.stack(loads),
        "saved": rows(causal_lm(saved, dtype=torch.float64)) if rank == 0 else {},
        "rows": [len(module.down_proj) for module in experts_modules(inner).values()],
    }


def train_all(folder: Path, cases: list[Case]) -> list[dict[str, Any]]:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    use_toolkit_kernel()
    return [train(folder, case) for case in cases]


def reference(case: Case) -> Case:
    return (1, 1, *case[2:4], "blocks", "eager")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, list[dict[str, Any]]]:
    """What each rank recorded, by case."""
    folder, found = tmp_path_factory.mktemp("families"), {}
    for family in FAMILIES:
        torch.manual_seed(1)
        awaken(causal_lm(config(family), dtype=torch.float64)).save_pretrained(folder / family)
    everything = [*CASES, *dict.fromkeys(map(reference, CASES))]
    for world in (1, 2, 4):
        cases = [case for case in everything if case[0] == world]
        for case, *ranks in zip(cases, *run_distributed(train_all, world, folder, cases, timeout_s=300), strict=True):
            found[case] = ranks
    return found


def gathered(ranks: list[dict[str, Any]], key: str, step: int | None = None) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for rank in ranks:
        found |= rank[key] if step is None else rank[key][step]
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_family_trains_as_on_one_process(runs: Any, case: Case):
    ranks, (alone,) = runs[case], runs[reference(case)]
    for rank in ranks:
        assert rank["losses"] == pytest.approx(alone["losses"], rel=1e-6)
        assert rank["norms"] == pytest.approx(alone["norms"], rel=1e-6)
    for step in range(STEPS):
        assert_equal_rows(gathered(ranks, "grads", step), alone["grads"][step], 1e-6)
    assert_equal_rows(gathered(ranks, "weights"), alone["weights"], 1e-6)
    assert torch.equal(sum(rank["load"] for rank in ranks), alone["load"])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_rank_holds_its_own_experts_alone(runs: Any, case: Case):
    _, ep_size, *_, placement, _ = case
    for number, rank in enumerate(runs[case]):
        assert set(rank["rows"]) == {len(place(placement, ep_size).slots[number % ep_size])}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_saved_weights_are_ordinary_ones_without_difference(runs: Any, case: Case):
    held, saved = gathered(runs[case], "weights"), runs[case][0]["saved"]
    assert saved.keys() == held.keys()
    assert all(torch.equal(saved[name], value) for name, value in held.items())
    assert len({name for name in saved if name.endswith("down_proj/0")}) * EXPERTS <= len(saved)
