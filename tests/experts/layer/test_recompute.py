"""Recomputation: equal values, one routing decision and one count per forward pass, and fewer saved activations."""

import os
from typing import Any, get_args
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from benchmarks.support.processes import run_distributed
from tests.experts.models import make_layer
from toolkit.experts.layer.losses import RouterPenalty
from toolkit.experts.layer.moe_layer import MoE, make_moe
from toolkit.experts.layer.recompute import checkpoint
from toolkit.experts.layer.router import TopKRouter
from toolkit.experts.layer.router_options import RouterOptions
from toolkit.experts.parallel.groups import make_expert_groups
from toolkit.experts.placement.cost_model import EXCHANGES
from toolkit.experts.placement.placement_options import ExpertExchange

DIM, EXPERTS, TOP_K = 16, 8, 2
SIZES = (DIM, 24, EXPERTS, TOP_K)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"activation": "swiglu", "router": RouterOptions(router_score="sigmoid", balance="bias")},
    {"capacity_factor": 0.8, "shared_expert": True},
]


def tokens(seed: int, count: int = 40) -> Tensor:
    return torch.randn(count, DIM, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def step(layer: nn.Module, *, micro_batches: int = 2, forwards_first: bool = False) -> dict[str, Any]:
    """Return outputs, gradients and counts of a step with router losses."""
    forwards = {n: each.expert_stack.log.follow() for n, each in layer.named_modules() if isinstance(each, MoE)}
    penalty, losses, found = RouterPenalty(layer, balance_weight=0.1, z_weight=0.1), [], {}
    for micro in range(micro_batches):
        torch.manual_seed(micro)
        x_TD = tokens(micro)
        y_TD = layer(x_TD)
        losses.append(y_TD.square().sum() + penalty())
        found[f"y{micro}"] = y_TD.detach()
        if not forwards_first:
            losses.pop().backward()
            found[f"x{micro}"] = x_TD.grad
    for loss in losses:
        loss.backward()
    found |= {name: p.grad for name, p in layer.named_parameters()}
    for name, cursor in forwards.items():
        found[f"{name}.loads"] = [(each.load_E, each.dropped_E) for each in cursor.take()]
    return found


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recompute_keeps_values_gradients_and_counts(options: dict[str, Any], recompute: str) -> None:
    for forwards_first in (False, True):
        expected = step(make_layer(*SIZES, **options), forwards_first=forwards_first)
        recomputed = step(make_layer(*SIZES, **options, recompute=recompute), forwards_first=forwards_first)
        torch.testing.assert_close(recomputed, expected)
        assert sum(load_E.sum() for load_E, _ in expected[".loads"]) == 2 * 40 * TOP_K


class Block(nn.Module):
    """Two MoE layers with a linear layer between them; `recompute` recomputes the block in the backward pass."""

    def __init__(self, *, recompute: bool, layers: str = "none"):
        super().__init__()
        self.first = make_layer(*SIZES, recompute=layers)
        self.second = make_layer(*SIZES, activation="swiglu", recompute=layers)
        self.middle, self.recompute = nn.Linear(DIM, DIM), recompute

    def compute(self, x_TD: Tensor) -> Tensor:
        x_TD = x_TD + self.first(x_TD)
        return x_TD + self.second(self.middle(x_TD).tanh())

    def forward(self, x_TD: Tensor) -> Tensor:
        return checkpoint(self.compute, x_TD) if self.recompute else self.compute(x_TD)


@pytest.mark.parametrize("layers", ["none", "selective", "full"])
def test_checkpointed_block_with_nested_regions_equals_no_recompute(layers: str) -> None:
    torch.testing.assert_close(step(Block(recompute=True, layers=layers)), step(Block(recompute=False)))


class UnsteadyRouter(TopKRouter):
    """Pairs of experts have equal scores up to rounding errors, which alternate between forward passes."""

    calls = 0

    def scores(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        self.weight.data[1::2] = self.weight.data[::2]
        self.calls += 1
        noise_E = 1e-6 * (torch.arange(self.num_experts) + self.calls) % 2e-6
        logits_TE, scores_TE = super().scores(x_TD)
        return logits_TE + noise_E, scores_TE + noise_E


def unsteady_layer(**options: Any) -> MoE:
    layer = make_layer(*SIZES, **options)
    layer.router = UnsteadyRouter(DIM, EXPERTS, 1)
    torch.manual_seed(2)
    nn.init.normal_(layer.router.weight)
    return layer


def gradients(layer: MoE, y_TD: Tensor) -> Tensor:
    y_TD.square().sum().backward()
    return torch.cat([p.grad.flatten() for p in layer.experts.parameters() if p.grad is not None])


def test_recompute_with_an_unsteady_router_repeats_the_choice() -> None:
    x_TD = tokens(0)
    plain, recomputed = unsteady_layer(), unsteady_layer(recompute="full")
    expected = gradients(plain, plain(x_TD))
    torch.testing.assert_close(gradients(recomputed, recomputed(x_TD)), expected)
    assert recomputed.router.calls == 2
    assert torch.equal(recomputed.load_E, plain.load_E)
    for use_reentrant in (False, True):
        checkpointed = unsteady_layer()
        wrong = gradients(checkpointed, torch_checkpoint(checkpointed, x_TD, use_reentrant=use_reentrant))
        assert (wrong - expected).norm() > 0.1 * expected.norm()
        assert torch.equal(checkpointed.load_E, plain.load_E), "one count per forward pass"


def test_recompute_saves_fewer_bytes() -> None:
    def saved(recompute: str) -> int:
        storages: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        layer = make_moe(DIM, 256, EXPERTS, TOP_K, activation="swiglu", recompute=recompute)  # type: ignore[arg-type]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y_TD = layer(tokens(0, 400))
        assert y_TD.requires_grad
        weights = {p.untyped_storage().data_ptr() for p in layer.experts.parameters()}
        return sum(size for pointer, size in storages.items() if pointer not in weights)

    wide = 400 * TOP_K * 2 * 256 * 4  # bytes of gate and up
    inputs_and_outputs = 2 * 400 * TOP_K * DIM * 4  # bytes of both for each pair, which are not saved
    assert wide < saved("none") < wide + inputs_and_outputs
    assert saved("selective") <= saved("none") - wide
    assert saved("full") < saved("selective") / 2


# torch.compile instantiates each autograd function that it traces, and reads gradients of tensors.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.usefixtures("unchecked_shapes")
def test_recompute_in_a_compiled_model_keeps_gradients(recompute: str) -> None:
    gradients = []
    for layers in ("none", recompute):
        block, x_TD = Block(recompute=False, layers=layers), tokens(0)
        model = torch.compile(block, backend="eager") if layers == recompute else block
        gradients.append(torch.autograd.grad(model(x_TD).square().sum(), [x_TD, *block.parameters()]))
    torch.testing.assert_close(*gradients)


def sharded_steps() -> dict[Any, tuple[dict[str, Tensor], int]]:
    """Return steps with sharded experts, and their numbers of all-to-alls."""
    found = {}
    for exchange in get_args(ExpertExchange):
        with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="1"):
            groups = make_expert_groups(dist.get_world_size(), exchange=exchange)
        for recompute in ("none", "selective", "full"):
            for factor in (None, 0.7):
                layer = make_layer(*SIZES, groups=groups, recompute=recompute, capacity_factor=factor)
                with mock.patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as calls:
                    found[exchange, recompute, factor] = step(layer, micro_batches=1), calls.call_count
    return found


def test_full_recompute_repeats_the_exchanges_of_rows_and_not_of_sizes() -> None:
    for rank in run_distributed(sharded_steps, 2):
        for (exchange, recompute, factor), (values, exchanges) in rank.items():
            torch.testing.assert_close(values, rank["flat", "none", factor][0])
            once, again = (EXCHANGES, 2) if exchange == "flat" else (2 * EXCHANGES, 4)
            assert exchanges == once + (again if recompute == "full" else 0)
