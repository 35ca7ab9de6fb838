"""Which optimizers can be used for parameters whose rows are on several ranks, tried and not known by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from toolkit.errors import UserError
from toolkit.experts.parallel.groups import ExpertGroups
from toolkit.experts.parallel.optimizer_rows import refuse_coupled_rows
from toolkit.experts.parallel.ownership import mark_owned
from toolkit.experts.sharding.prepared_optimizer import fit_states, has_stepped


class ClippedByModel(torch.optim.SGD):
    """Divides all gradients by their norm over all parameters that this process has, or by `least` if that is more."""

    least = 0.0

    def step(self, closure: Any = None) -> None:
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        norm = torch.stack([g.norm() for g in grads]).norm()
        for grad in grads:
            grad.div_(norm.clamp(min=self.least))
        super().step(closure)


class ClippedWhereLarge(ClippedByModel):
    least = 1e4


class LayerwiseRate(torch.optim.SGD):
    """As LARS: the rate of each tensor follows the norm of its weights over that of its gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] * (p.norm() / p.grad.norm()).item())


class Unwilling(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        raise RuntimeError("call train() first")


class ClippedByTensor(torch.optim.Optimizer):
    """Steps of the size of the gradient's root mean square, over all rows: blind to a constant factor of a row."""

    def __init__(self, parameters: Iterable[Tensor], lr: float = 0.1):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            squares = state.setdefault("squares", torch.zeros_like(parameter))
            squares.lerp_(parameter.grad.square(), 0.5)
            update = parameter.grad / squares.sqrt().clamp(min=1e-8)
            parameter.sub_(self.param_groups[0]["lr"] * update / update.square().mean().sqrt().clamp(min=1))


def transformers_adafactor(parameters: Iterable[Tensor], **settings: Any) -> torch.optim.Optimizer:
    from transformers.optimization import Adafactor

    return Adafactor(parameters, **settings)


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Owned weights and biases of four experts, and a replicated matrix."""
    found = [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in ((4, 6, 8), (4, 6), (8, 3), (3,))]
    for parameter in found[:2]:
        mark_owned(parameter, row_ids=range(4, 8), groups=ExpertGroups(ep_size=2, ep_rank=1))
    return found


PER_ROW: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.0, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-8, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.0), weight_decay=0.1, capturable=False, foreach=False),
    "fused": lambda p: torch.optim.AdamW(p, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, initial_accumulator_value=0.1),
    "adadelta": torch.optim.Adadelta,
    "adamax": torch.optim.Adamax,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "rprop": torch.optim.Rprop,
    "asgd": torch.optim.ASGD,
}
COUPLED: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "torch's Adafactor": torch.optim.Adafactor,
    "transformers' Adafactor": transformers_adafactor,
    "another Adafactor": lambda p: transformers_adafactor(p, lr=1e-8, relative_step=False, scale_parameter=False),
    "LBFGS": torch.optim.LBFGS,
    "LARS": lambda p: LayerwiseRate(p, lr=0.0),
    "clips by itself": lambda p: ClippedByModel(p, lr=1.0),
    "clips what is large": lambda p: ClippedWhereLarge(p, lr=1.0),
    "clips each tensor": ClippedByTensor,
}


@pytest.mark.parametrize("name", PER_ROW)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_optimizer_that_treats_each_number_by_itself_is_accepted_and_not_touched(
    name: str, dtype: torch.dtype
) -> None:
    listed = parameters(dtype)
    optimizer = PER_ROW[name](listed)
    optimizer.register_step_post_hook(lambda *_: pytest.fail("a hook was called"))
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    before, seed = repr(optimizer.state_dict()), torch.random.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        refuse_coupled_rows(optimizer)
    assert repr(optimizer.state_dict()) == before
    assert torch.equal(torch.random.get_rng_state(), seed)
    assert all((p == 1).all() and p.grad is None for p in listed)


@pytest.mark.parametrize("has_biases", [True, False])
@pytest.mark.parametrize("name", COUPLED)
def test_an_optimizer_with_statistics_over_rows_is_refused_where_rows_are_owned(name: str, has_biases: bool) -> None:
    listed = parameters()
    if not has_biases:
        del listed[1]
    with pytest.raises(UserError, match="uses statistics of several experts"):
        refuse_coupled_rows(COUPLED[name](listed))
    assert all((p == 1).all() and p.grad is None for p in listed)
    refuse_coupled_rows(COUPLED[name](listed[-2:]))


def test_state_without_a_row_for_each_expert_is_refused_on_one_process() -> None:
    alone = nn.Parameter(torch.ones(4, 6))
    mark_owned(alone, row_ids=range(4), groups=ExpertGroups())
    with pytest.raises(UserError, match=r"state 'exp_avg_sq_col' of 'Adafactor' has shape \(4,\), and the experts"):
        refuse_coupled_rows(transformers_adafactor([alone]))
    refuse_coupled_rows(LayerwiseRate([alone]))


def test_an_optimizer_that_cannot_be_tried_is_named() -> None:
    with pytest.warns(UserWarning, match=r"Unwilling could not be tried on small tensors \(RuntimeError: call train"):
        refuse_coupled_rows(Unwilling(parameters(), lr=0.1))


def test_states_that_an_optimizer_was_made_with_follow_the_rows() -> None:
    whole = nn.Parameter(torch.ones(8, 6))
    optimizer = torch.optim.Adagrad([whole], initial_accumulator_value=0.5)
    assert not has_stepped(optimizer)
    whole.data = whole.data[:3].clone()
    fit_states(optimizer, whole, torch.Size([8, 6]))
    assert torch.equal(optimizer.state[whole]["sum"], torch.full((3, 6), 0.5))
    whole.grad = torch.arange(18.0).view(3, 6)
    optimizer.step()
    assert has_stepped(optimizer)
