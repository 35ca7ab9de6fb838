"""Errors of loops that would train experts wrongly, and loops that `tests/parity` does not combine."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.state import AcceleratorState
from accelerate.utils import GradientAccumulationPlugin
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from benchmarks.support.processes import run_distributed
from tests.integrations.accelerate.toy import Toy, ToyLoop, adamw, error_of, samples, sgd
from tests.parity.layouts import Layout
from tests.parity.models import DIM, EXPERTS
from tests.parity.outcome import Rows, gathered
from tests.support.equality import assert_equal_rows
from tests.support.placements import by_slot
from toolkit.experts.moving.migrate import place_experts
from toolkit.integrations.accelerate.expert_parallel import ExpertParallel


def clipping_errors() -> list[str]:
    """Return the errors of clipping by torch, by Accelerate, and by torch with a norm that is not reached."""
    by_torch = nn.utils.clip_grad_norm_
    return [
        error_of(ToyLoop().train, range(3), max_norm, clip)
        for max_norm, clip in ((0.01, by_torch), (0.01, None), (1e6, by_torch))
    ]


def error_after(change: Callable[[Any], object], *, frozen: bool = False, **options: Any) -> str:
    """Return the error of steps 10 to 12 after a change of the model. Weights are checked in step 12."""
    model = Toy()
    model.head.weight.requires_grad_(not frozen)
    loop = ToyLoop(model=model, **options)
    with mock.patch("toolkit.experts.parallel.replica_check.EVERY", 12):
        loop.train(range(9))
        change(model)
        return error_of(loop.train, range(9, 12))


def unfreezing_errors() -> list[str]:
    return [error_after(lambda model: model.head.weight.requires_grad_(), frozen=True)]


def place_experts_errors() -> list[str]:
    """Return the errors of `place_experts` after a backward pass, after zero_grad, after a step, and after a step
    without the experts' optimizer and with another one."""
    loop = ToyLoop(
        lambda m: torch.optim.SGD([p for p in m.parameters() if p is not m.head.weight], lr=0.1, momentum=0.9),
        lambda m: torch.optim.SGD([m.head.weight], lr=0.1),
    )
    optimizer, other = loop.optimizers
    place = partial(place_experts, loop.raw, by_slot([*range(1, EXPERTS), 0], 2))
    loop.backward(samples())
    errors = [error_of(place, optimizer)]
    optimizer.zero_grad()
    errors.append(error_of(place, optimizer))
    loop.backward(samples())
    optimizer.step()
    return errors + [error_of(place, each) for each in (optimizer, None, other)]


def functional_call_errors() -> list[str]:
    """Return the errors of a step after a forward pass with weights adapted to each rank's batch, and to a common
    batch."""
    errors = []
    for seed in (dist.get_rank(), 0):
        loop = ToyLoop()
        weights = {name: p for name, p in loop.raw.named_parameters() if "experts" not in name}
        x = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        grads = torch.autograd.grad(loop.model(x).square().mean(), list(weights.values()))
        adapted = {name: p - grad for (name, p), grad in zip(weights.items(), grads, strict=True)}
        functional_call(loop.raw, adapted, (x,)).square().mean().backward()
        for parameter in weights.values():  # the call bypasses DDP
            dist.all_reduce(parameter.grad)
        errors.append(error_of(loop.optimizers[0].step))
    return errors


def assigned_gradient_errors() -> list[str]:
    """Return the errors of a step without a backward pass, with assigned gradients and with zeros."""
    errors = []
    for value in (1.0, 0.0):
        loop = ToyLoop()
        loop.backward(samples())
        loop.optimizers[0].step()
        for parameter in loop.raw.parameters():
            parameter.grad = torch.full_like(parameter, value)
        if dist.get_rank() == 1:
            loop.raw.blocks[0].moe.experts.up.grad.zero_()
        errors.append(error_of(loop.optimizers[0].step))
    return errors


def unused_parameter_errors() -> list[str]:
    errors = []
    for find_unused in (False, True):
        model = Toy()
        model.unused = nn.Linear(2, 2)
        handlers = [DistributedDataParallelKwargs(find_unused_parameters=True)] if find_unused else []
        loop = ToyLoop(model=model, accelerator=Accelerator(cpu=True, kwargs_handlers=handlers))
        errors.append(error_of(loop.train, range(3)))
    return errors


ERRORS: dict[str, tuple[Callable[[], list[str]], list[str]]] = {
    "clipping by torch": (
        clipping_errors,
        [BY_ONE_RANK := r"^clip_grad_norm_: .*Call accelerator\.clip_grad_norm_", "^$", BY_ONE_RANK],
    ),
    "unfrozen parameter": (
        unfreezing_errors,
        [r"the gradients of 1 parameter\(s\), first 'head.weight', differ between ranks in step 10"],
    ),
    "place_experts within a step": (
        place_experts_errors,
        [
            "^placement: experts have gradients that would be lost.",
            "^$",
            "^$",
            "^optimizer=None: the experts were prepared with another optimizer.",
            "^optimizer=SGD: the experts were prepared with another optimizer.",
        ],
    ),
    "functional_call": (functional_call_errors, ["'stem.* differ between ranks in a forward pass of step 1", "^$"]),
    "assigned gradients": (assigned_gradient_errors, ["gradients of experts were assigned without a backward", "^$"]),
    "unused parameter": (unused_parameter_errors, [r"2 parameter\(s\), first 'unused.weight', got no gradient", "^$"]),
}
"""Functions that return the errors of several loops, and patterns of the errors; "^$" matches no error."""


def find_all_errors() -> dict[str, list[str]]:
    return {case: errors() for case, (errors, _) in ERRORS.items()}


@pytest.fixture(scope="module")
def errors() -> list[dict[str, list[str]]]:
    return run_distributed(find_all_errors, 2)


@pytest.mark.parametrize("case", ERRORS)
def test_invalid_loop_raises_on_all_ranks(case: str, errors: list[dict[str, list[str]]]) -> None:
    first, second = (rank[case] for rank in errors)
    assert first == second
    for message, pattern in zip(first, ERRORS[case][1], strict=True):
        assert re.search(pattern, message, re.DOTALL)


def change_expert_on_rank_3(model: Any) -> None:
    model.blocks[1].moe.experts.down.data[0] += 0.01 * (dist.get_rank() == 3)


def test_experts_that_drifted_apart_between_ep_groups_raise_at_the_next_check() -> None:
    expected = "the weights of 1 parameter(s), first 'blocks.1.moe.experts.down' of the experts of EP rank 1, differ"
    for message in run_distributed(partial(error_after, change_expert_on_rank_3, ep_size=2), 4):
        assert expected in message


def train_two_models(ep_size: int) -> tuple[Tensor, list[Rows]]:
    """Return gradient norms and weights of two models with one accelerator."""
    accelerator = Accelerator(cpu=True)
    loops = [ToyLoop(adamw, accelerator=accelerator, ep_size=ep_size) for _ in range(2)]
    norms = [norm for step in range(3) for loop in loops for norm in loop.train([step], max_norm=0.3)]
    return torch.stack(norms), [loop.weights() for loop in loops]


def test_two_models_of_one_accelerator_equal_one_process() -> None:
    ((expected_norms, expected),) = run_distributed(train_two_models, 1, 1)
    norms, weights = zip(*run_distributed(train_two_models, 4, 2), strict=True)
    for found in norms:
        torch.testing.assert_close(found, expected_norms, rtol=1e-10, atol=0)
    for ranks, rows in zip(zip(*weights, strict=True), expected, strict=True):
        assert_equal_rows(gathered(ranks), rows, 1e-10)


def prepare_with_a_dense_model() -> bool:
    dense, model = nn.Linear(5, 5).double(), Toy()
    experts = ExpertParallel(Accelerator(cpu=True))
    first, second, *optimizers = experts.prepare(dense, model, sgd(dense), sgd(model))
    second(first(samples())).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
    is_sharded = [*experts.stacks] == ["blocks.0.moe.experts", "blocks.1.moe.experts"]
    return is_sharded and isinstance(first, DistributedDataParallel)


def test_prepare_shards_the_model_with_experts_among_several() -> None:
    assert all(run_distributed(prepare_with_a_dense_model, 2))


def train_with_skipped_blocks(placement: str, ep_size: int | None) -> list[Rows]:
    """Return weights with and without clipping after steps whose last micro-batch skips a block."""
    found = []
    for max_norm in (0.3, None):
        AcceleratorState._reset_state()
        accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False),
            kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
        )
        loop = ToyLoop(adamw, accelerator=accelerator, placement=placement, ep_size=ep_size)
        for micro_batch in range(8):
            loop.raw.skipped = (micro_batch // 2 % 2,) if micro_batch % 2 else ()
            with accelerator.accumulate(loop.model):
                loop.train([micro_batch], max_norm)
        found.append(loop.weights())
    return found


@pytest.mark.parametrize(("world", "placement", "ep_size"), [(2, "replicas", None), (4, "contiguous", 2)])
def test_layer_skipped_by_the_last_micro_batch_equals_one_process(
    world: int, placement: str, ep_size: int | None
) -> None:
    (expected,) = run_distributed(train_with_skipped_blocks, 1, "contiguous", None)
    found = zip(*run_distributed(train_with_skipped_blocks, world, placement, ep_size), strict=True)
    for ranks, rows in zip(found, expected, strict=True):
        assert_equal_rows(gathered(ranks), rows, 1e-10)


def evaluate_in_join(forwards: list[int], nodes: int) -> list[Tensor]:
    """Return the largest difference from an unsharded model of each batch of this rank."""
    reference, model = Toy(), Toy()
    model.register_buffer("counter", torch.zeros(2))  # DDP broadcasts buffers in each forward pass
    loop = ToyLoop(model=model, groups=Layout(2, 2, nodes=nodes).groups())
    with loop.experts.join():
        batches = [samples(step) for step in range(forwards[dist.get_rank()])]
        differences = [(loop.model(x) - reference(x)).abs().max() for x in batches]
    assert all(stack.dispatcher.announce is None for stack in loop.experts.stacks.values())
    model.counter.fill_(dist.get_rank())
    loop.train([0])
    assert model.counter.tolist() == [0, 0], "DDP broadcasts buffers again"
    return differences


@pytest.mark.parametrize(("forwards", "nodes"), [([3, 1], 1), ([0, 2], 2), ([0, 0], 1)])
def test_join_with_unequal_batches_equals_one_process(forwards: list[int], nodes: int) -> None:
    ranks = run_distributed(evaluate_in_join, 2, forwards, nodes, timeout_s=60)
    assert [len(differences) for differences in ranks] == forwards
    assert all(difference < 1e-10 for differences in ranks for difference in differences)


def error_in_join(loop: ToyLoop, call: Callable[[Tensor], object], x: Tensor) -> str:
    def run() -> None:
        with loop.experts.join():
            call(x)

    return error_of(run)


def evaluate_copies_in_join() -> tuple[bool, str]:
    """Return whether a copy equals the model in a join of both, and the error of a join that does not name the copy."""
    loop = ToyLoop()
    average = AveragedModel(loop.raw)
    batches = [samples(step) for step in range(3 if dist.get_rank() == 0 else 1)]
    with loop.experts.join(average, loop.model):
        equal = all(torch.equal(average(x), loop.model(x)) for x in batches)
    with loop.experts.join(average):
        for x in batches:
            average(x)
    return equal, error_in_join(loop, average, samples())


def test_join_serves_named_copies_and_raises_for_others() -> None:
    for equal, message in run_distributed(evaluate_copies_in_join, 2, timeout_s=60):
        assert equal
        assert "experts.join(model, copy)" in message


def different_layers_error() -> str:
    loop = ToyLoop()
    return error_in_join(loop, loop.raw.blocks[dist.get_rank()], torch.ones(2, DIM, dtype=torch.float64))


def test_join_ranks_in_different_layers_raises() -> None:
    for message in run_distributed(different_layers_error, 2, timeout_s=60):
        assert "ranks are in different layers, 'blocks.0.moe.experts' and 'blocks.1.moe.experts'" in message
