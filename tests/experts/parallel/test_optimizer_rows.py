"""Detection of optimizers that couple the rows of a parameter, by trial; Muon of stacked experts."""

import warnings
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from bitsandbytes.optim import AdamW8bit
from torch import Tensor, nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

import toolkit as tk
from tests.parity.models import RoutedExperts
from toolkit.errors import UserError
from toolkit.experts.layer.moe_layer import make_moe
from toolkit.experts.muon import Muon, muon_groups, orthogonal
from toolkit.experts.parallel.groups import ExpertGroups
from toolkit.experts.parallel.optimizer_rows import refuse_coupled_rows
from toolkit.experts.parallel.ownership import mark_owned
from toolkit.experts.parallel.sync import ExpertSync
from toolkit.experts.sharding.shard import shard_experts


class ClippedByModel(torch.optim.SGD):
    """SGD with gradients that are divided by their norm over all parameters, or by `least` if that is larger."""

    least = 0.0

    def step(self, closure: Any = None) -> None:
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        norm = torch.stack([g.norm() for g in grads]).norm()
        for grad in grads:
            grad.div_(norm.clamp(min=self.least))
        super().step(closure)


class ClippedIfLarge(ClippedByModel):
    least = 1e4


class LayerwiseRate(torch.optim.SGD):
    """LARS: the rate of each tensor is proportional to the norm of its weights over the norm of its gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] * (p.norm() / p.grad.norm()).item())


class ClippedByTensor(torch.optim.Optimizer):
    """Divides updates by their root mean square over all rows, which a constant factor of a row does not change."""

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


class RaisesInStep(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        raise RuntimeError("call train() first")


def transformers_adafactor(parameters: Iterable[Tensor], **settings: Any) -> torch.optim.Optimizer:
    from transformers.optimization import Adafactor

    return Adafactor(parameters, **settings)


def make_parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Return owned weights and biases of four experts, and replicated weights and biases."""
    found = [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in ((4, 6, 8), (4, 6), (8, 3), (3,))]
    for parameter in found[:2]:
        mark_owned(parameter, row_ids=range(4, 8), groups=ExpertGroups(ep_size=2, ep_rank=1))
    return found


ELEMENTWISE = {
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
COUPLED = {
    "torch Adafactor": torch.optim.Adafactor,
    "transformers Adafactor": transformers_adafactor,
    "unscaled Adafactor": lambda p: transformers_adafactor(p, lr=1e-8, relative_step=False, scale_parameter=False),
    "LBFGS": torch.optim.LBFGS,
    "LARS": lambda p: LayerwiseRate(p, lr=0.0),
    "clips by model": lambda p: ClippedByModel(p, lr=1.0),
    "clips large gradients": lambda p: ClippedIfLarge(p, lr=1.0),
    "clips by tensor": ClippedByTensor,
}


@pytest.mark.parametrize("name", ELEMENTWISE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_elementwise_optimizer_passes_and_stays_unchanged(name: str, dtype: torch.dtype) -> None:
    parameters = make_parameters(dtype)
    optimizer = ELEMENTWISE[name](parameters)
    optimizer.register_step_post_hook(lambda *_: pytest.fail("a hook was called"))
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    before, seed = repr(optimizer.state_dict()), torch.random.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        refuse_coupled_rows(optimizer)
    assert repr(optimizer.state_dict()) == before
    assert torch.equal(torch.random.get_rng_state(), seed)
    assert all((p == 1).all() and p.grad is None for p in parameters)


@pytest.mark.parametrize("has_biases", [True, False])
@pytest.mark.parametrize("name", COUPLED)
def test_optimizer_with_statistics_over_rows_raises_for_owned_rows(name: str, has_biases: bool) -> None:
    parameters = make_parameters()
    if not has_biases:
        del parameters[1]
    with pytest.raises(UserError, match="uses statistics of several experts"):
        refuse_coupled_rows(COUPLED[name](parameters))
    assert all((p == 1).all() and p.grad is None for p in parameters)
    refuse_coupled_rows(COUPLED[name](parameters[-2:]))


def test_state_without_a_row_per_expert_raises_on_one_process() -> None:
    parameter = nn.Parameter(torch.ones(4, 6))
    mark_owned(parameter, row_ids=range(4), groups=ExpertGroups())
    with pytest.raises(UserError, match=r"state 'exp_avg_sq_col' of 'Adafactor' has shape \(6,\), and the experts"):
        refuse_coupled_rows(transformers_adafactor([parameter]))
    refuse_coupled_rows(LayerwiseRate([parameter]))


def test_8_bit_states_raise_in_the_trial_or_after_the_first_step() -> None:
    raises = pytest.raises(UserError, match=r"state 'qmap1' of 'AdamW8bit' has shape \(256,\), and the experts")
    for shape, in_trial in [((4, 32, 64), raises), ((4, 2048), nullcontext())]:
        experts = nn.ParameterList([torch.ones(shape)])
        mark_owned(experts[0], row_ids=range(4), groups=ExpertGroups())
        optimizer = AdamW8bit(experts.parameters())
        with in_trial:
            ExpertSync(experts, optimizer)
    experts[0].grad = torch.ones(shape)
    with raises:
        optimizer.step()


def test_optimizer_that_fails_in_the_trial_warns() -> None:
    with pytest.warns(UserWarning, match=r"RaisesInStep could not be tried on small tensors \(RuntimeError: call tra"):
        refuse_coupled_rows(RaisesInStep(make_parameters(), lr=0.1))


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.8, "weight_decay": 0.03}], ids=["default", "custom"])
def test_muon_of_a_stack_equals_torch_for_each_expert(settings: dict[str, float]):
    torch.manual_seed(0)
    stack, matrix = nn.Parameter(torch.randn(3, 12, 8)), nn.Parameter(torch.randn(4, 8))
    single = [nn.Parameter(value.clone()) for value in (*stack.detach(), matrix.detach())]
    optimizer = Muon([{"params": [stack, matrix]}], lr=0.1, **settings)
    torch_settings = {"momentum": 0.95, "weight_decay": 0.1, **settings}
    reference = torch.optim.Muon(single, lr=0.1, adjust_lr_fn="match_rms_adamw", **torch_settings)
    for _ in range(4):
        stack.grad, matrix.grad = torch.randn_like(stack), torch.randn_like(matrix)
        for parameter, gradient in zip(single, (*stack.grad, matrix.grad), strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
        with mock.patch.object(Tensor, "bfloat16", Tensor.float):  # torch rounds to bfloat16 on a CPU, too
            reference.step()
        torch.testing.assert_close(torch.stack(single[:3]), stack, rtol=0, atol=1e-6)
        torch.testing.assert_close(single[3], matrix, rtol=0, atol=1e-6)


def test_muon_groups_decay_expert_matrices_and_not_stacked_biases():
    model = RoutedExperts()
    shard_experts(model)
    config = tk.RunConfig(batch_size=8, optimizer=tk.OptimizerOptions(weight_decay=0.7))
    for optimizer in (Muon(muon_groups(model), weight_decay=0.7), tk.build_optimizer(model, config)):
        decay_of = {
            parameter: group["weight_decay"] for group in optimizer.param_groups for parameter in group["params"]
        }
        found = {name: decay_of[parameter] for name, parameter in model.named_parameters()}
        assert found == {"gate.weight": 0.7, "experts.up": 0.7, "experts.up_bias": 0.0, "experts.down": 0.7}


def test_muon_steps_other_parameters_as_adamw():
    torch.manual_seed(0)
    model, reference = nn.Embedding(5, 4), nn.Embedding(5, 4)
    reference.load_state_dict(model.state_dict())
    muon = Muon(muon_groups(model), lr=0.1, betas=(0.8, 0.9))
    adamw = torch.optim.AdamW(reference.parameters(), lr=0.1, betas=(0.8, 0.9), weight_decay=0.1)
    for _ in range(3):
        for module, optimizer in ((model, muon), (reference, adamw)):
            module.weight.grad = torch.cos(module.weight.detach())
            optimizer.step()
    torch.testing.assert_close(model.weight, reference.weight)


def test_muon_groups_orthogonalizes_matrices_of_experts_and_hidden_layers():
    sizes = Qwen3MoeConfig(hidden_size=8, moe_intermediate_size=12, num_experts=4, num_experts_per_tok=2)
    layers = {
        "moe": make_moe(8, 12, 4, 2),
        "sparse": Qwen3MoeSparseMoeBlock(sizes),
        "linear": nn.Linear(8, 8, bias=False),
    }
    model = nn.ModuleDict({"embedding": nn.Embedding(5, 8), **layers, "norm": nn.LayerNorm(8)})
    names = {parameter: name for name, parameter in model.named_parameters()}
    chosen: dict[bool, set[str]] = {True: set(), False: set()}
    for group in muon_groups(model):
        chosen[group["orthogonalize"]] |= {names[parameter] for parameter in group["params"]}
    assert chosen[True] == {name for name in names.values() if ".experts." in name} | {"linear.weight"}
    assert chosen[True] | chosen[False] == set(names.values())


def test_orthogonal_of_zeros_and_of_float64():
    assert not orthogonal(torch.zeros(2, 3, 4)).any()
    singular_values = torch.linalg.svdvals(orthogonal(torch.randn(2, 6, 9, dtype=torch.float64)))
    assert ((singular_values > 0.5) & (singular_values < 1.5)).all()
