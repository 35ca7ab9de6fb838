"""What users do in loops of their own equals one process, or raises."""

from __future__ import annotations

import os
from collections.abc import Callable
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
from torch.utils.checkpoint import checkpoint

from benchmarks.support.processes import run_distributed
from tests.integrations.accelerate.test_expert_parallel import DIM, Model, by_id, place, together
from tests.support.equality import assert_equal_rows
from tests.support.placements import by_slot
from toolkit.errors import UserError
from toolkit.experts.moving.migrate import place_experts
from toolkit.experts.parallel.groups import make_expert_groups
from toolkit.experts.placement.placement_options import ExpertExchange
from toolkit.integrations.accelerate.expert_parallel import ExpertParallel


class CheckpointedModel(Model):
    """Each block is recomputed in the backward, if `use_reentrant` is not None."""

    use_reentrant: bool | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).tanh()
        for block in self.blocks:
            x = block(x) if self.use_reentrant is None else checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.head(x)


class SkippingModel(Model):
    """Leaves out the blocks `skipped`, as LayerDrop does, alike on all ranks."""

    skipped: tuple[int, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).tanh()
        for number, block in enumerate(self.blocks):
            if number not in self.skipped:
                x = block(x)
        return self.head(x)


class WithUnused(Model):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(2, 2)


def batch(step: int = 0) -> Tensor:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def refused(train: Any) -> str:
    try:
        train()
    except UserError as error:
        return str(error)
    return ""


def clipped_with(max_norm: float, *, by_torch: bool) -> str:
    accelerator, model = Accelerator(cpu=True), Model()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = ExpertParallel(accelerator).prepare(model, optimizer)

    def train() -> None:
        for step in range(3):
            accelerator.backward(model(batch(step)).square().mean())
            (nn.utils.clip_grad_norm_ if by_torch else accelerator.clip_grad_norm_)(model.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()

    return refused(train)


def clips() -> list[str]:
    return [clipped_with(0.01, by_torch=True), clipped_with(0.01, by_torch=False), clipped_with(1e6, by_torch=True)]


def test_clipping_by_torch_raises_if_ranks_scale_differently():
    first, second = run_distributed(clips, 2)
    assert first == second
    noticed, ours, harmless = first
    assert "in step 1," in noticed
    assert "accelerator.clip_grad_norm_" in noticed
    assert ours == harmless == ""


def changed_after_step_9(change: Callable[[nn.Module], object], *, frozen: bool, **options: Any) -> str:
    """What is said in twelve steps, the last of which is checked, of a `change` after the ninth."""
    accelerator, model = Accelerator(cpu=True), Model()
    model.head.weight.requires_grad_(not frozen)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared, optimizer = ExpertParallel(accelerator, **options).prepare(model, optimizer)

    def train() -> None:
        for step in range(1, 13):
            accelerator.backward(prepared(batch(step)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            if step == 9:
                change(model)

    with mock.patch("toolkit.experts.parallel.replica_check.EVERY", 12):
        return refused(train)


def change_on_one_rank(model: Any) -> None:
    model.head.weight.data[0, 0] += 0.01 * (dist.get_rank() == 1)


def change_an_expert_on_one_rank(model: Any) -> None:
    model.blocks[1].experts.down.data[0] += 0.01 * (dist.get_rank() == 3)


def unfreeze(model: Any) -> None:
    model.head.weight.requires_grad_()


def changes_after_step_9() -> list[str]:
    return [changed_after_step_9(change_on_one_rank, frozen=False), changed_after_step_9(unfreeze, frozen=True)]


def test_weights_that_drifted_apart_raise_at_the_next_check():
    first, second = run_distributed(changes_after_step_9, 2)
    assert first == second
    drifted, unfrozen = first
    several = "of 1 parameter(s), first 'head.weight', differ between ranks in step"
    assert f"the weights {several} 12" in drifted
    assert f"the gradients {several} 10" in unfrozen


def expert_changed_after_step_9() -> str:
    return changed_after_step_9(change_an_expert_on_one_rank, frozen=False, ep_size=2)


def test_experts_that_drifted_apart_between_ep_groups_raise_at_the_next_check():
    for said in run_distributed(expert_changed_after_step_9, 4):
        assert (
            "the weights of 1 parameter(s), first 'blocks.1.experts.down' of the experts of EP rank 1, differ" in said
        )


def placed_amid_a_step() -> list[str]:
    """What is said of experts that are placed with gradients that no step has taken: after a backward, once they are
    dropped, and after a step whose gradients are still there; then without the optimizer, which has states by now, and
    with the one of the head."""
    accelerator, model = Accelerator(cpu=True), Model()
    optimizer: Any = torch.optim.SGD(
        [p for p in model.parameters() if p is not model.head.weight], lr=0.1, momentum=0.9
    )
    other: Any = torch.optim.SGD([model.head.weight], lr=0.1)
    prepared, optimizer, other = ExpertParallel(accelerator).prepare(model, optimizer, other)
    experts = sum(len(row) for row in model.blocks[0].experts.expert_stack.placement.slots)
    moved = by_slot([*range(1, experts), 0], 2)

    def place() -> None:
        place_experts(model, moved, optimizer)

    said = []
    accelerator.backward(prepared(batch()).square().mean())
    said.append(refused(place))
    optimizer.zero_grad()
    said.append(refused(place))
    accelerator.backward(prepared(batch()).square().mean())
    optimizer.step()
    said.append(refused(place))
    said += [refused(lambda each=each: place_experts(model, moved, each)) for each in (None, other)]
    return said


def test_place_experts_between_a_backward_and_its_step_raises():
    first, second = run_distributed(placed_amid_a_step, 2)
    assert first == second
    amid, dropped, after, alone, with_another = first
    assert amid.startswith("placement: experts have gradients that would be lost.")
    assert dropped == after == ""
    assert alone.startswith("optimizer=None: the experts were prepared with another optimizer.")
    assert with_another.startswith("optimizer=SGD: the experts were prepared with another optimizer.")


def called_with_other_weights() -> list[str]:
    """What the step says after a forward pass with weights that the ranks made of their own batch, and of a common
    one."""
    said = []
    for seed_of in (lambda: dist.get_rank(), lambda: 0):
        accelerator, model = Accelerator(cpu=True), Model()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        wrapped, optimizer = ExpertParallel(accelerator).prepare(model, optimizer)

        def train(
            model: Any = model, wrapped: Any = wrapped, optimizer: Any = optimizer, seed: int = seed_of()
        ) -> None:
            weights = {name: p for name, p in model.named_parameters() if "experts" not in name}
            x = torch.randn(6, 5, generator=torch.Generator().manual_seed(seed))
            steps = torch.autograd.grad(wrapped(x).square().mean(), list(weights.values()))
            adapted = {name: p - step for (name, p), step in zip(weights.items(), steps, strict=True)}
            functional_call(model, adapted, (x,)).square().mean().backward()
            for parameter in weights.values():  # DDP has no part in it
                dist.all_reduce(parameter.grad)
            optimizer.step()

        said.append(refused(train))
    return said


def test_forward_pass_with_weights_that_differ_between_ranks_raises():
    first, second = run_distributed(called_with_other_weights, 2)
    assert first == second
    own, common = first
    assert "first 'stem.weight', differ between ranks in a forward pass of step 1" in own
    assert common == ""


def steps_without_a_backward_pass() -> list[str]:
    """What is said of a step with gradients that were assigned, and of one with the zeros of the last step."""
    said = []
    for value in (1.0, 0.0):
        accelerator, model = Accelerator(cpu=True), Model()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        wrapped, optimizer = ExpertParallel(accelerator).prepare(model, optimizer)
        wrapped(batch()).square().mean().backward()
        optimizer.step()
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, value)
        if dist.get_rank() == 1:
            model.blocks[0].experts.up.grad.zero_()
        said.append(refused(optimizer.step))
    return said


def test_step_with_assigned_gradients_of_experts_raises_on_all_ranks():
    first, second = run_distributed(steps_without_a_backward_pass, 2)
    assert first == second
    assigned, zeros = first
    assert assigned.startswith("optimizer: gradients of experts were assigned without a backward pass")
    assert zeros == ""


def two_models(ep_size: int) -> dict[str, Any]:
    """Norms and weights of two models with experts in turn with one accelerator."""
    accelerator = Accelerator(cpu=True)
    models = [Model().double(), Model().double()]
    optimizers: list[Any] = [torch.optim.AdamW(model.parameters(), lr=0.02) for model in models]
    wrapped: list[Any] = [*models]
    for number, model in enumerate(models):
        experts = ExpertParallel(accelerator, ep_size=ep_size)
        wrapped[number], optimizers[number] = experts.prepare(model, optimizers[number])
    draws, norms = torch.Generator().manual_seed(1), []
    for _ in range(3):
        x = torch.randn(8, 5, dtype=torch.float64, generator=draws)
        mine = x.chunk(accelerator.num_processes)[accelerator.process_index]
        for model, optimizer in zip(wrapped, optimizers, strict=True):
            accelerator.backward(model(mine).square().mean())
            norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.3))
            optimizer.step()
            optimizer.zero_grad()
    return {"norms": torch.stack(norms), "weights": [by_id(model, lambda p: p.detach()) for model in models]}


def test_models_of_one_accelerator_are_each_clipped_as_by_one_process():
    (alone,), ranks = run_distributed(two_models, 1, 1), run_distributed(two_models, 4, 2)
    for rank in ranks:
        torch.testing.assert_close(rank["norms"], alone["norms"], rtol=1e-10, atol=0)
    for number, expected in enumerate(alone["weights"]):
        assert_equal_rows(together([rank["weights"][number] for rank in ranks]), expected, 1e-10)


def prepared_after_a_dense_model() -> bool:
    dense, model = nn.Linear(5, 5), Model()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (dense, model)]
    experts = ExpertParallel(Accelerator(cpu=True))
    first, second, *others = experts.prepare(dense, model, *optimizers)
    second(first(batch())).square().mean().backward()
    for optimizer in others:
        optimizer.step()
    return [*experts.stacks] == ["blocks.0.experts", "blocks.1.experts"] and isinstance(first, DistributedDataParallel)


def test_prepare_shards_the_model_with_experts_among_several():
    assert all(run_distributed(prepared_after_a_dense_model, 2))


def steps_with_an_unused_parameter() -> list[str]:
    said = []
    for find_unused in (False, True):
        handlers = [DistributedDataParallelKwargs(find_unused_parameters=True)] if find_unused else []
        accelerator, model = Accelerator(cpu=True, kwargs_handlers=handlers), WithUnused()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        wrapped, optimizer = ExpertParallel(accelerator).prepare(model, optimizer)

        def train(wrapped: Any = wrapped, optimizer: Any = optimizer) -> None:
            for step in range(3):
                wrapped(batch(step)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()

        said.append(refused(train))
    return said


def test_parameter_without_a_gradient_raises_with_the_setting():
    first, second = run_distributed(steps_with_an_unused_parameter, 2)
    assert first == second
    assert "2 parameter(s), first 'unused.weight', got no gradient" in first[0]
    assert first[1] == ""


def trained_with_skipped_layers(clips: bool, **options: Any) -> dict[str, Tensor]:
    """Weights after steps of two micro-batches, of which the last leaves out one block in turn."""
    AcceleratorState._reset_state()
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False),
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
    )
    model = SkippingModel().double()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.02)
    placement = place(options.pop("placement", "blocks"))
    wrapped, optimizer = ExpertParallel(accelerator, placement=placement, **options).prepare(model, optimizer)
    draws = torch.Generator().manual_seed(1)
    for step in range(4):
        for skipped in ((), (step % 2,)):
            x = torch.randn(8, 5, dtype=torch.float64, generator=draws)
            mine = x.chunk(accelerator.num_processes)[accelerator.process_index]
            model.skipped = skipped
            with accelerator.accumulate(wrapped):
                accelerator.backward(wrapped(mine).square().sum() * accelerator.num_processes)
                if clips and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(wrapped.parameters(), 0.3)
                optimizer.step()
                optimizer.zero_grad()
    return by_id(model, lambda p: p.detach())


def trained_with_and_without_clipping(options: dict[str, Any]) -> list[dict[str, Tensor]]:
    return [trained_with_skipped_layers(clips, **options) for clips in (True, False)]


@pytest.mark.parametrize(("world", "options"), [(2, {"placement": "copies"}), (4, {"ep_size": 2})])
def test_layer_skipped_by_the_last_micro_batch_equals_one_process(world: int, options: dict[str, Any]):
    (expected,) = run_distributed(trained_with_and_without_clipping, 1, {})
    found = zip(*run_distributed(trained_with_and_without_clipping, world, options), strict=True)
    for ranks, alone in zip(found, expected, strict=True):
        assert_equal_rows(together(list(ranks)), alone, 1e-10)


def loads_when_checkpointed() -> list[list[list[int]]]:
    found = []
    for use_reentrant in (None, False, True):
        model = CheckpointedModel()
        model.use_reentrant = use_reentrant
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        experts = ExpertParallel(Accelerator(cpu=True))
        wrapped, optimizer = experts.prepare(model, optimizer)
        wrapped(batch()).square().mean().backward()
        with torch.no_grad():
            wrapped(batch(1))  # in training mode, and still no training
        found.append([stack.log.load_E.tolist() for stack in experts.stacks.values()])
    return found


def test_loads_with_activation_checkpointing_are_counted_once():
    for plain, not_reentrant, reentrant in run_distributed(loads_when_checkpointed, 2):
        assert sum(plain[0]) == 12
        assert plain == not_reentrant == reentrant


def evaluated(forwards: list[int], exchange: ExpertExchange) -> list[Tensor]:
    """What the model says of this rank's batches, of which each has its own number, and of the same after the join."""
    torch.manual_seed(0)
    alone, model = Model(), Model()
    model.register_buffer("counter", torch.zeros(2))  # which DDP would broadcast in each forward
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="1"):  # two nodes
        groups = make_expert_groups(2, exchange=exchange)
    experts = ExpertParallel(Accelerator(cpu=True), groups=groups)
    wrapped, optimizer = experts.prepare(model, optimizer)
    differences = []
    with experts.join():
        for step in range(forwards[dist.get_rank()]):
            differences.append((wrapped(batch(step)) - alone(batch(step))).abs().max())
    assert all(stack.dispatcher.announce is None for stack in experts.stacks.values())
    model.counter.fill_(dist.get_rank())
    wrapped(batch()).square().mean().backward()  # training goes on
    optimizer.step()
    assert model.counter.tolist() == [0, 0], "DDP broadcasts buffers again"
    return differences


def copies_evaluated(forwards: list[int]) -> tuple[bool, str]:
    """Whether a copy and the model say the same in a join of both; and what the join of the model says of the copy."""
    torch.manual_seed(0)
    model = Model()
    experts = ExpertParallel(Accelerator(cpu=True))
    wrapped, _ = experts.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    average = AveragedModel(model)
    same = True
    with experts.join(average, wrapped):
        for step in range(forwards[dist.get_rank()]):
            same &= torch.equal(average(batch(step)), wrapped(batch(step)))
    with experts.join(average):
        for step in range(forwards[dist.get_rank()]):
            average(batch(step))
    with pytest.raises(UserError) as said, experts.join():
        average(batch())
    return same, str(said.value)


def test_join_serves_named_copies_and_raises_for_others():
    for same, said in run_distributed(copies_evaluated, 2, [3, 1], timeout_s=60):
        assert same
        assert "experts.join(model, copy)" in said


def call_other_layers() -> str:
    model: Any = Model()
    experts = ExpertParallel(Accelerator(cpu=True))
    experts.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(UserError) as said, experts.join():
        model.blocks[dist.get_rank()](torch.randn(2, DIM))
    return str(said.value)


def test_join_ranks_in_different_layers_raises():
    for said in run_distributed(call_other_layers, 2, timeout_s=60):
        assert "ranks are in different layers, 'blocks.0.experts' and 'blocks.1.experts'" in said


@pytest.mark.parametrize(("forwards", "exchange"), [([3, 1], "flat"), ([0, 2], "hierarchical"), ([0, 0], "flat")])
def test_join_with_unequal_batches_equals_one_process(forwards: list[int], exchange: str):
    ranks = run_distributed(evaluated, 2, forwards, exchange, timeout_s=60)
    assert [len(differences) for differences in ranks] == forwards
    assert all(difference < 1e-5 for differences in ranks for difference in differences)
