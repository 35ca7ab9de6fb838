"""Muon of stacked experts, compared with the optimizers of torch."""

import pytest
import torch
from torch import nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from tests.parity.models import RoutedExperts
from toolkit.experts.layer.moe_layer import make_moe
from toolkit.experts.muon import Muon, muon_groups, orthogonal
from toolkit.experts.sharding.shard import shard_experts


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
        reference.step()
        torch.testing.assert_close(torch.stack(single[:3]), stack, rtol=0, atol=1e-6)
        torch.testing.assert_close(single[3], matrix, rtol=0, atol=1e-6)


def test_muon_groups_decay_expert_matrices_and_not_stacked_biases():
    model = RoutedExperts()
    shard_experts(model)
    optimizer = Muon(muon_groups(model), weight_decay=0.7)
    decay_of = {parameter: group["weight_decay"] for group in optimizer.param_groups for parameter in group["params"]}
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
