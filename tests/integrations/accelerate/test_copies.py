"""Copies of a prepared model compute with their own experts: averages of weights, reference models, snapshots."""

from __future__ import annotations

import copy
import os
import pickle
import warnings
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from benchmarks.support.families import tokens
from benchmarks.support.precision import in_float64
from benchmarks.support.processes import run_distributed
from tests.integrations.accelerate.test_expert_parallel import BATCH, MIGRATING, Model, by_id, place, shares, together
from tests.integrations.peft.models import adapted, base, rows
from tests.support.equality import assert_equal_rows
from toolkit.dynamic.dynamic_layer import make_dynamic_moe
from toolkit.experts.layer.moe_layer import make_moe
from toolkit.experts.moving.migrate import place_experts
from toolkit.experts.parallel.groups import make_expert_groups
from toolkit.experts.placement.placement_options import ExpertExchange
from toolkit.integrations.accelerate.expert_parallel import ExpertParallel
from toolkit.integrations.transformers import save_pretrained

X = torch.randn(BATCH, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def prepared(**options: Any) -> tuple[Accelerator, Any, Any, ExpertParallel]:
    accelerator, model = Accelerator(cpu=True), Model().double()
    experts = ExpertParallel(accelerator, **options)
    return accelerator, *experts.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1)), experts


def step(accelerator: Accelerator, model: Any, optimizer: Any) -> None:
    accelerator.backward(model(X[shares(1)[0]]).square().sum() * accelerator.num_processes)
    optimizer.step()
    optimizer.zero_grad()


def reference_and_average(kind: str, ranks: int, exchange: ExpertExchange = "flat") -> tuple[dict[str, Tensor], ...]:
    """Of copies made after a training forward, while the original goes on: what they compute, their weights, and the
    gradients of one that is trained itself."""
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="1"):  # each rank is a node
        groups = make_expert_groups(ranks, exchange=exchange)
    accelerator, model, optimizer, _ = prepared(placement=place(kind), spare_slots=1, groups=groups)
    raw = accelerator.unwrap_model(model)
    model(X[shares(1)[0]])
    reference, wrapped = copy.deepcopy(raw), copy.deepcopy(model)
    average = AveragedModel(raw, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    mine = X[shares(1)[0]]
    before = reference(mine).detach()
    assert torch.equal(before, raw(mine).detach())
    for _ in range(3):
        step(accelerator, model, optimizer)
        average.update_parameters(raw)
    assert torch.equal(reference(mine).detach(), before)
    assert not torch.equal(raw(mine).detach(), before)
    accelerator.backward(wrapped(mine).square().sum() * accelerator.num_processes)
    trained = accelerator.unwrap_model(wrapped)
    averaged = by_id(average.module, lambda p: p.detach())
    return averaged, by_id(reference, lambda p: p.detach()), by_id(trained, lambda p: p.grad)


@pytest.mark.parametrize(("kind", "exchange"), [("blocks", "flat"), ("shuffled", "hierarchical")])
def test_copies_equal_one_process(kind: str, exchange: ExpertExchange) -> None:
    (expected,) = run_distributed(reference_and_average, 1, kind, 1)
    for wanted, *ranks in zip(expected, *run_distributed(reference_and_average, 2, kind, 2, exchange), strict=True):
        assert_equal_rows(together(ranks), wanted, 1e-10)


def average_while_experts_move() -> tuple[dict[str, Tensor], list[str]]:
    accelerator, model, optimizer, experts = prepared(placement=place("shuffled"), **MIGRATING)
    raw = accelerator.unwrap_model(model)
    average = AveragedModel(raw)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            step(accelerator, model, optimizer)
            place_experts(average.module, {name: stack.placement for name, stack in experts.stacks.items()}, None)
            average.update_parameters(raw)
    return by_id(average.module, lambda p: p.detach()), [str(w.message) for w in caught if w.category is UserWarning]


def test_copy_warns_when_experts_move_and_can_follow() -> None:
    ((expected, _),) = run_distributed(average_while_experts_move, 1)
    (first, said), (second, _) = run_distributed(average_while_experts_move, 2)
    assert_equal_rows(together([first, second]), expected, 1e-10)
    assert len(said) == 2, "once for each layer"
    assert all("place_experts" in line for line in said)


@pytest.mark.parametrize("make", [make_moe, partial(make_dynamic_moe, max_experts=6)])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_layer_is_copied_after_a_training_forward(make: Any, duplicate: Any) -> None:
    layer: nn.Module = make(8, 16, 4, 2)
    x = torch.randn(6, 8)
    y = layer(x)
    copied = duplicate(layer)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    assert torch.equal(copied(x), y)


def pickled() -> None:
    _, model, _, _ = prepared()
    with pytest.raises(TypeError, match="ProcessGroup"):
        pickle.dumps(model.module)


def test_pickling_sharded_experts_raises() -> None:
    run_distributed(pickled, 2)


def copy_with_adapters(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Of a copy whose original loses its weights: its rows on this rank, and those of what it saves."""
    from peft import PeftModel

    with in_float64():
        model = adapted("mixtral")
        optimizer = torch.optim.SGD(p for p in model.parameters() if p.requires_grad)
        ExpertParallel(Accelerator(cpu=True), placement=place("shuffled")).prepare(model, optimizer)
        copied = copy.deepcopy(model)
        ids = tokens(0, 4)
        before = copied(input_ids=ids).logits
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        assert torch.equal(copied(input_ids=ids).logits, before)
        save_pretrained(copied, folder)
        dist.barrier()
        return rows(copied), rows(PeftModel.from_pretrained(base("mixtral"), folder))


def test_copy_has_the_adapters_of_experts(tmp_path: Path) -> None:
    (first, saved), (second, _) = run_distributed(copy_with_adapters, 2, tmp_path)
    held = first | second
    assert held.keys() == saved.keys()
    assert all(torch.equal(saved[name], value) for name, value in held.items())
