"""Copies of a prepared model use their own experts: weight averages, reference models, snapshots."""

from __future__ import annotations

import copy
import pickle
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from benchmarks.support.accelerators import make_accelerator
from benchmarks.support.families import tokens
from benchmarks.support.precision import in_float64
from benchmarks.support.processes import run_distributed
from tests.integrations.accelerate.toy import MIGRATING, ToyLoop, error_of, placement_of, samples, weights_of
from tests.integrations.peft.models import adapted, base, rows
from tests.parity.layouts import Layout
from tests.parity.models import RoutedExperts
from tests.parity.outcome import Rows, gathered, rows_by_id
from tests.support.equality import assert_equal_rows
from toolkit.dynamic.dynamic_layer import make_dynamic_moe
from toolkit.experts.layer.moe_layer import make_moe
from toolkit.experts.moving.copies import full_copy
from toolkit.experts.moving.migrate import place_experts
from toolkit.experts.sharding.shard import shard_experts
from toolkit.integrations.accelerate.expert_parallel import ExpertParallel
from toolkit.integrations.transformers import save_pretrained


def train_with_copies(placement: str, layout: Layout) -> tuple[Rows, Rows, Rows]:
    """Return the weights of an average and of a reference model, and the gradients of a trained copy.

    The copies are made after a training forward pass, and the original is trained further.
    """
    loop = ToyLoop(placement=placement, spare_slots=1, groups=layout.groups())
    model, raw, x = loop.model, loop.raw, samples()
    model(x)
    reference, wrapped = copy.deepcopy(raw), copy.deepcopy(model)
    average = AveragedModel(raw, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    before = reference(x).detach()
    assert torch.equal(before, raw(x).detach())
    for step in range(3):
        loop.train([step])
        average.update_parameters(raw)
    assert torch.equal(reference(x).detach(), before)
    assert not torch.equal(raw(x).detach(), before)
    loop.accelerator.backward(wrapped(x).square().sum() * loop.accelerator.num_processes)
    trained = loop.accelerator.unwrap_model(wrapped)
    return weights_of(average.module), weights_of(reference), gathered(rows_by_id(trained, lambda p: p.grad))


@pytest.mark.parametrize(("placement", "nodes"), [("contiguous", 1), ("shuffled", 2)])
def test_copies_equal_one_process(placement: str, nodes: int) -> None:
    (expected,) = run_distributed(train_with_copies, 1, placement, Layout(1, 1))
    ranks = run_distributed(train_with_copies, 2, placement, Layout(2, 2, nodes=nodes))
    for wanted, *found in zip(expected, *ranks, strict=True):
        assert_equal_rows(gathered(found), wanted, 1e-10)


def average_while_experts_move() -> tuple[Rows, list[str]]:
    """Return the averaged weights and the warnings."""
    loop = ToyLoop(placement="shuffled", replan=MIGRATING)
    average = AveragedModel(loop.raw)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(4):
            loop.train([step])
            place_experts(average.module, {name: s.placement for name, s in loop.experts.stacks.items()}, None)
            average.update_parameters(loop.raw)
    return weights_of(average.module), [str(each.message) for each in caught if each.category is UserWarning]


def test_copy_warns_when_experts_move_and_can_follow() -> None:
    ((expected, _),) = run_distributed(average_while_experts_move, 1)
    (first, messages), (second, _) = run_distributed(average_while_experts_move, 2)
    assert_equal_rows(gathered([first, second]), expected, 1e-10)
    assert len(messages) == 2, "once per layer"
    assert all("place_experts" in message for message in messages)


def error_of_average_made_before_sharding() -> str:
    model = RoutedExperts(2, 6)
    average = AveragedModel(model)
    shard_experts(model)
    return error_of(average.update_parameters, model)


def test_averaged_model_made_before_sharding_raises_with_one_row_per_rank() -> None:
    messages = run_distributed(error_of_average_made_before_sharding, 2)
    assert messages[0] == messages[1]
    assert messages[0].startswith("AveragedModel: it was made before the experts were sharded")


@pytest.mark.parametrize("make", [make_moe, partial(make_dynamic_moe, max_experts=6)])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_layer_copied_after_a_training_forward_pass_is_independent(make: Any, duplicate: Any) -> None:
    layer = make(8, 16, 4, 2)
    log, x = layer.expert_stack.log, torch.randn(6, 8)
    cursor, forwards = log.cursor(), log.follow(choices=True)
    y = layer(x)
    copied = duplicate(layer)
    assert int(copied.expert_stack.log.load_E.sum()) == 0
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    assert torch.equal(copied(x), y)
    assert int(copied.expert_stack.log.load_E.sum()) == int(cursor.new_load_E().sum()) == 6 * 2
    assert len(forwards) == 1
    layer(x[:3])
    assert len(forwards) == 2
    assert int(copied.expert_stack.log.load_E.sum()) == 6 * 2


def copy_with_adapters(duplicate: Any, dense: str, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the weights of a copy whose original is zeroed, and the weights that it saves."""
    from peft import PeftModel

    with in_float64():
        model = adapted("mixtral")
        optimizer = torch.optim.SGD(p for p in model.parameters() if p.requires_grad)
        accelerator = make_accelerator(dense, cpu=True)
        experts = ExpertParallel(accelerator, ep_size=2, placement=placement_of("shuffled"))
        experts.prepare(model, optimizer)
        ids = tokens(0, 4)
        expected = model(input_ids=ids).logits
        copied = duplicate(model)
        before = copied(input_ids=ids).logits
        torch.testing.assert_close(before, expected, rtol=1e-10, atol=1e-12)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        assert torch.equal(copied(input_ids=ids).logits, before)
        save_pretrained(copied, folder)
        dist.barrier()
        return rows(copied), rows(PeftModel.from_pretrained(base("mixtral"), folder))


@pytest.mark.parametrize(
    ("world", "duplicate", "dense"),
    [(2, copy.deepcopy, "ddp"), (2, full_copy, "ddp"), (4, full_copy, "fsdp2")],
)
def test_copy_after_a_forward_pass_has_the_adapters_of_experts(
    world: int, duplicate: Any, dense: str, tmp_path: Path
) -> None:
    (first, saved), *others = run_distributed(copy_with_adapters, world, duplicate, dense, tmp_path)
    for other, _ in others:
        first |= other
    assert_equal_rows(first, saved, 0.0)
