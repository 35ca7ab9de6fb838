"""DDP and Accelerate know one kind of parameter, a copy on every rank. What goes wrong with experts that have owners.

Each test first shows the trap on plain Accelerate, so that it tells when upstream has closed it, and then that ours
is right or refuses.
"""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.equality import replicas_agree
from tests.support.helpers import run_distributed
from tests.traps.toys import ToyMixture, gradients, my_mean_loss, norm_of, reference_gradients, rows_of, spread
from toolkit.errors import UserError
from toolkit.experts.layer import dispatcher
from toolkit.experts.parallel.groups import ExpertGroups
from toolkit.experts.parallel.ownership import is_owned, mark_owned
from toolkit.experts.parallel.sync import ExpertSync
from toolkit.integrations.accelerate.prepare import prepare

EXACT = {"rtol": 1e-12, "atol": 1e-14}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def ignore_experts(model: nn.Module) -> None:
    """The half of the remedy that is known from forums: DDP's ignore list, and nothing else."""
    names = [name for name, p in model.named_parameters() if is_owned(p)]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)


def backward_with_ours(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer, list[nn.Parameter]]:
    accelerator, parameters = Accelerator(), list(model.parameters())
    prepared, optimizer = prepare(accelerator, model, sgd(model))
    accelerator.backward(my_mean_loss(prepared))
    ExpertSync(parameters).before_clip()
    return prepared, optimizer, parameters


# --- G2: the initial broadcast --------------------------------------------------------------------------------------


def experts_after_preparation() -> dict[str, Any]:
    groups, reference = spread(), reference_gradients()
    untouched = ToyMixture(groups)

    plain = ToyMixture(groups)
    accelerator = Accelerator()
    with mock.patch.object(DistributedDataParallel, "__init__", DistributedDataParallel.__init__.__wrapped__):
        prepared = accelerator.prepare(plain)  # DDP as it is without the toolkit
    accelerator.backward(my_mean_loss(prepared))
    plain_head = gradients(prepared)["head.weight"]

    ours = ToyMixture(groups)
    prepared, _, _ = backward_with_ours(ours)
    ours_head = gradients(prepared)["head.weight"]
    return {
        "untouched": untouched.moe.experts.up.detach(),
        "plain": plain.moe.experts.up.detach(),
        "ours": ours.moe.experts.up.detach(),
        "plain_error": ((plain_head - reference["head.weight"]).norm() / reference["head.weight"].norm()).item(),
        "ours_error": ((ours_head - reference["head.weight"]).norm() / reference["head.weight"].norm()).item(),
    }


def test_g2_ddp_overwrites_every_ranks_experts_with_those_of_rank_0_and_ours_leaves_them():
    first, second = run_distributed(experts_after_preparation, 2)
    assert not torch.equal(first["untouched"], second["untouched"])
    assert torch.equal(second["plain"], first["untouched"])
    assert second["plain_error"] > 0.05, "dense gradients are off too, because the wrong experts answered"

    assert torch.equal(second["ours"], second["untouched"])
    assert max(first["ours_error"], second["ours_error"]) < 1e-12


# --- G3: sum against mean -------------------------------------------------------------------------------------------


def gradients_with_ignore_list() -> dict[str, Any]:
    groups, reference = spread(), reference_gradients()
    plain = ToyMixture(groups)
    ignore_experts(plain)
    accelerator = Accelerator()
    prepared = accelerator.prepare(plain)
    with mock.patch.object(dispatcher.ScaledGradient, "apply", lambda rows, _: rows):  # as any other all-to-all
        accelerator.backward(my_mean_loss(prepared))
    plain_grads = gradients(prepared)
    expected = rows_of(reference["moe.experts.up"], groups)
    used = expected.abs() > 1e-6
    ratios = (plain_grads["moe.experts.up"] / expected)[used]

    ours = gradients(backward_with_ours(ToyMixture(groups))[0])
    for name, expected in reference.items():
        mine = rows_of(expected, groups) if "experts" in name else expected
        torch.testing.assert_close(ours[name], mine, **EXACT)
    return {"ratios": (ratios.min().item(), ratios.max().item()), "covered": sorted(ours)}


@pytest.mark.parametrize("world_size", [2, 4])
def test_g3_ignored_expert_gradients_are_a_sum_where_ddp_takes_the_mean_and_ours_divides(world_size: int):
    for answer in run_distributed(gradients_with_ignore_list, world_size):
        assert answer["ratios"] == pytest.approx((world_size, world_size), rel=1e-9)
        assert len(answer["covered"]) == 7


# --- G4: clipping ---------------------------------------------------------------------------------------------------


def one_clipped_step(clip: str) -> dict[str, Any]:
    """One SGD step with right gradients, clipped by Accelerate or by us at half the true norm."""
    groups, true_norm = spread(), norm_of(reference_gradients())
    model = ToyMixture(groups)
    _, optimizer, parameters = backward_with_ours(model)
    if clip == "plain":
        norm = Accelerator().clip_grad_norm_(parameters, true_norm / 2)
    else:
        norm = ExpertSync(parameters).clip(parameters, true_norm / 2)
    expected = {
        name: p.detach() - 0.1 * grad * (0.5 / (1 + 1e-6 / true_norm))
        for (name, p), grad in zip(
            ToyMixture(ExpertGroups()).named_parameters(), reference_gradients().values(), strict=True
        )
    }
    optimizer.step()
    dense = {n: p.detach() for n, p in model.named_parameters() if "experts" not in n}
    return {
        "norm": norm.item(),
        "true_norm": true_norm,
        "agree": replicas_agree(model),
        "dense": dense,
        "error": max((dense[n] - expected[n]).abs().max().item() for n in dense),
    }


def test_g4_accelerate_clips_by_a_norm_of_its_own_on_each_rank_and_ours_by_the_global_one():
    first, second = run_distributed(one_clipped_step, 2, "plain")
    assert first["norm"] != pytest.approx(second["norm"], rel=1e-3)
    assert not torch.equal(first["dense"]["head.weight"], second["dense"]["head.weight"]), "copies have drifted apart"
    assert not first["agree"]
    assert not second["agree"]

    for answer in run_distributed(one_clipped_step, 2, "ours"):
        assert answer["norm"] == pytest.approx(answer["true_norm"], rel=1e-12)
        assert answer["agree"]
        assert answer["error"] < 1e-12


# --- a parameter on the root module ---------------------------------------------------------------------------------


class RootOwner(nn.Module):
    """An owned parameter directly on the model that is wrapped."""

    def __init__(self, groups: ExpertGroups):
        super().__init__()
        self.mine = nn.Parameter(torch.full((1,), 1.0 + groups.ep_rank))
        self.ours = nn.Parameter(torch.ones(1))
        mark_owned(self.mine, row_ids=[groups.ep_rank], groups=groups)

    def forward(self, x: Tensor) -> Tensor:
        return self.mine * self.ours * x


def root_parameter() -> dict[str, Any]:
    groups = spread()
    plain = RootOwner(groups)
    ignore_experts(plain)
    accelerator = Accelerator()
    prepared = accelerator.prepare(plain)
    accelerator.backward(prepared(torch.ones(1) * (1 + dist.get_rank())).sum())
    with pytest.raises(ValueError, match="owned parameter 'mine' must live in a sub-module, not on the root"):
        prepare(accelerator, plain, sgd(plain))
    return {"weight": plain.mine.item(), "gradient": plain.mine.grad.item()}


def test_the_ignore_list_averages_gradients_of_a_root_parameter_after_all_and_ours_refuses_it():
    answers = run_distributed(root_parameter, 2)
    assert [a["weight"] for a in answers] == [1.0, 2.0], "the broadcast did leave it alone"
    assert [a["gradient"] for a in answers] == [1.5, 1.5], "1 and 2 on their own, averaged all the same"


# --- fp16 -----------------------------------------------------------------------------------------------------------


class Fp16Accelerator:
    """What `prepare` asks of an Accelerator; a real one offers fp16 on GPUs only."""

    mixed_precision = "fp16"
    num_processes = 2


def scaled_step_with_an_overflow_on_rank_1() -> tuple[float, str]:
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale((weight * (float("inf") if dist.get_rank() == 1 else 1.0)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    model = ToyMixture(spread())
    with pytest.raises(UserError) as refusal:
        prepare(Fp16Accelerator(), model, sgd(model))  # type: ignore[arg-type]
    return weight.item(), str(refusal.value)


def test_an_overflow_in_one_ranks_experts_makes_ranks_disagree_on_the_step_and_ours_refuses_fp16():
    (stepped, refusal), (skipped, _) = run_distributed(scaled_step_with_an_overflow_on_rank_1, 2)
    assert (stepped, skipped) == (0.5, 1.0)
    assert refusal.startswith("mixed_precision: 'fp16' looks for overflow on each rank only")
    assert "bf16" in refusal
    assert "\n" not in refusal
