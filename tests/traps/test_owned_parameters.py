"""Traps for expert-parallel parameters, because DDP and Accelerate assume replicated parameters.

Most tests show the wrong result of plain Accelerate, so that they fail once upstream is fixed; `tests/parity` shows the
right result of the toolkit. The others show an error of the toolkit.
"""

from unittest import mock

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad

from benchmarks.support.precision import relative_difference
from benchmarks.support.processes import run_distributed
from tests.integrations.accelerate.toy import sgd
from tests.support.equality import replicas_agree
from tests.traps.toys import ToyMoE, expert_groups, gradients, local_loss, reference_gradients
from toolkit.errors import UserError
from toolkit.experts.layer import dispatcher
from toolkit.experts.layer.rows import Pairs
from toolkit.experts.parallel.gradient_average import GradientAverage
from toolkit.experts.parallel.ownership import is_owned, mark_owned, owned
from toolkit.integrations.accelerate.prepare import prepare


def ignore_experts(model: nn.Module) -> None:
    names = [name for name, p in model.named_parameters() if is_owned(p)]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)


def prepare_experts() -> tuple[Tensor, Tensor, float]:
    """Return expert weights before and after DDP's broadcast, and the error of the gradient of the head."""
    expected = reference_gradients()["head.weight"]
    initial, plain = ToyMoE(expert_groups()), ToyMoE(expert_groups())
    accelerator = Accelerator()
    with mock.patch.object(DistributedDataParallel, "__init__", DistributedDataParallel.__init__.__wrapped__):
        prepared = accelerator.prepare(plain)  # DDP without the toolkit
    accelerator.backward(local_loss(prepared))
    up, plain_up = (model.moe.experts.up.detach() for model in (initial, plain))
    return up, plain_up, relative_difference(plain.head.weight.grad, expected)


def test_ddp_overwrites_experts_with_rank_0():
    (initial_0, *_), (initial_1, plain_1, error) = run_distributed(prepare_experts, 2)
    assert not torch.equal(initial_0, initial_1)
    assert torch.equal(plain_1, initial_0)
    assert error > 0.05, "non-expert gradients of the wrong experts"


def scale_of_ignored_gradients() -> tuple[float, float]:
    """Return the smallest and largest ratio of gradients on DDP's ignore list to the reference."""
    groups = expert_groups()
    plain = ToyMoE(groups)
    ignore_experts(plain)
    accelerator = Accelerator()
    prepared = accelerator.prepare(plain)
    with mock.patch.object(dispatcher, "Pairs", lambda *inputs: Pairs(*inputs[:2])):  # as any other all-to-all
        accelerator.backward(local_loss(prepared))
    expected = reference_gradients()["moe.experts.up"].chunk(groups.ep_size)[groups.ep_rank]
    ratios = (gradients(prepared)["moe.experts.up"] / expected)[expected.abs() > 1e-6]
    return ratios.min().item(), ratios.max().item()


@pytest.mark.parametrize("world_size", [2, 4])
def test_ignored_expert_gradients_are_a_sum_and_not_the_mean_of_ddp(world_size: int):
    for ratios in run_distributed(scale_of_ignored_gradients, world_size):
        assert ratios == pytest.approx((world_size, world_size), rel=1e-9)


def clip_without_guard() -> tuple[float, bool]:
    """Clip by Accelerate, as if the toolkit did not raise; return the norm and whether replicas agree after a step."""
    unguarded = getattr(clip_grad._clip_grads_with_norm_, "__wrapped__", clip_grad._clip_grads_with_norm_)
    with (
        mock.patch("toolkit.experts.layer.stack.guard_torch"),
        mock.patch.object(clip_grad, "_clip_grads_with_norm_", unguarded),
    ):
        accelerator, model = Accelerator(), ToyMoE(expert_groups())
        prepared, optimizer = prepare(accelerator, model, sgd(model))
        accelerator.backward(local_loss(prepared))
        GradientAverage(owned(model.parameters())).finish()
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        return norm.item(), replicas_agree(model)


def test_accelerate_clips_by_a_different_norm_on_each_rank():
    (first, agree), (second, _) = run_distributed(clip_without_guard, 2)
    assert first != pytest.approx(second, rel=1e-3)
    assert not agree


def prepare_root_parameter() -> None:
    model, groups = nn.Linear(1, 2), expert_groups()
    mark_owned(model.weight, row_ids=range(2), groups=groups)
    with pytest.raises(ValueError, match="owned parameter 'weight' must live in a sub-module, not on the root"):
        prepare(Accelerator(), model, sgd(model))


def test_owned_parameter_of_the_root_module_raises():
    run_distributed(prepare_root_parameter, 2)


class Fp16Accelerator:
    """Stand-in for an Accelerator with fp16, which needs a GPU."""

    mixed_precision = "fp16"
    is_fsdp2 = False
    num_processes = 2


def prepare_under_fp16() -> None:
    model = ToyMoE(expert_groups())
    with pytest.raises(UserError, match=r"^mixed_precision: 'fp16' looks for overflow on each rank only.*bf16"):
        prepare(Fp16Accelerator(), model, sgd(model))


def test_fp16_with_sharded_experts_raises():
    run_distributed(prepare_under_fp16, 2)
