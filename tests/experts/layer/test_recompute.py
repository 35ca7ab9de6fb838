"""A checkpointed layer is the layer: the same numbers, one decision, one count, fewer activations kept."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, get_args
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from tests.integrations.transformers.families import config, randomize_routers
from tests.integrations.transformers.families import tokens as tokens_of_step
from tests.support.helpers import run_distributed
from toolkit.experts.layer.losses import RouterPenalty
from toolkit.experts.layer.moe_layer import MoE, make_moe
from toolkit.experts.layer.recompute import checkpoint
from toolkit.experts.layer.router import TopKRouter
from toolkit.experts.layer.router_options import RouterOptions
from toolkit.experts.parallel.groups import ExpertGroups, make_expert_groups
from toolkit.experts.placement.cost_model import EXCHANGES
from toolkit.experts.placement.placement_options import ExpertExchange
from toolkit.integrations.accelerate.expert_parallel import ExpertParallel
from toolkit.integrations.transformers import recompute_blocks
from toolkit.train.models.mlp import MLP

DIM, EXPERTS, TOP_K = 16, 8, 2
ROUTERS: list[dict[str, Any]] = [
    {},
    {
        "activation": "swiglu",
        "router": RouterOptions(router_score="sigmoid", balance="bias"),
    },
    {"capacity_factor": 0.8},
    {"capacity_factor": 0.8, "shared_expert": True},
]


def layer_with(groups: ExpertGroups | None = None, *, shared_expert: bool = False, **options: Any) -> MoE:
    torch.manual_seed(1)
    shared = MLP(DIM, 8, DIM) if shared_expert else None
    layer = make_moe(DIM, 24, EXPERTS, TOP_K, groups=groups, shared_expert=shared, **options)
    nn.init.normal_(layer.router.weight)
    return layer


def tokens(seed: int, count: int = 40) -> Tensor:
    return torch.randn(count, DIM, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def step(layer: nn.Module, *, micro_batches: int = 2, forwards_first: bool = False) -> dict[str, Tensor]:
    """Outputs, all gradients and counts of a step with router losses."""
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
    for name, module in layer.named_modules():
        if isinstance(module, MoE):
            found |= {f"{name}.load": module.load_E, f"{name}.dropped": module.expert_stack.log.dropped_E}
    return found


@pytest.mark.parametrize("options", ROUTERS)
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_changes_no_value_gradient_or_count(options: dict[str, Any], recompute: str) -> None:
    expected = step(layer_with(**options))
    torch.testing.assert_close(step(layer_with(**options, recompute=recompute)), expected)
    assert expected[".load"].sum() == 2 * 40 * TOP_K


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_of_torch_logs_each_forward_pass_once(use_reentrant: bool) -> None:
    layer = layer_with()
    torch_checkpoint(layer, tokens(1), use_reentrant=use_reentrant).sum().backward()
    assert layer.load_E.sum() == 40 * TOP_K


def test_several_forwards_before_their_backwards_each_find_their_own_decisions() -> None:
    expected = step(layer_with(), micro_batches=3, forwards_first=True)
    torch.testing.assert_close(step(layer_with(recompute="full"), micro_batches=3, forwards_first=True), expected)


class Block(nn.Module):
    """Two mixtures with a dense layer between; `recompute` does it all again in the backward."""

    def __init__(self, *, recompute: bool, layers: str = "none"):
        super().__init__()
        self.first, self.second = layer_with(recompute=layers), layer_with(activation="swiglu", recompute=layers)
        self.middle, self.recompute = nn.Linear(DIM, DIM), recompute

    def compute(self, x_TD: Tensor) -> Tensor:
        x_TD = x_TD + self.first(x_TD)
        return x_TD + self.second(self.middle(x_TD).tanh())

    def forward(self, x_TD: Tensor) -> Tensor:
        return checkpoint(self.compute, x_TD) if self.recompute else self.compute(x_TD)


@pytest.mark.parametrize("layers", ["none", "selective", "full"])
def test_a_block_of_several_mixtures_is_recomputed_whole_and_regions_may_nest(layers: str) -> None:
    torch.testing.assert_close(step(Block(recompute=True, layers=layers)), step(Block(recompute=False)))


class UnsteadyRouter(TopKRouter):
    """Experts come in pairs of equal scores; each second forward favours the other of each pair by a rounding error."""

    calls = 0

    def scores(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        self.weight.data[1::2] = self.weight.data[::2]
        self.calls += 1
        noise_E = 1e-6 * (torch.arange(self.num_experts) + self.calls) % 2e-6
        logits_TE, scores_TE = super().scores(x_TD)
        return logits_TE + noise_E, scores_TE + noise_E


def unsteady_layer(**options: Any) -> MoE:
    layer = layer_with(**options)
    layer.router = UnsteadyRouter(DIM, EXPERTS, 1)
    torch.manual_seed(2)
    nn.init.normal_(layer.router.weight)
    return layer


def gradients(layer: MoE, y_TD: Tensor) -> Tensor:
    y_TD.square().sum().backward()
    return torch.cat([p.grad.flatten() for p in layer.experts.parameters() if p.grad is not None])


def test_a_router_that_would_choose_otherwise_in_the_recomputation_is_not_called() -> None:
    x_TD = tokens(0)
    plain = unsteady_layer()
    expected = gradients(plain, plain(x_TD))

    ours = unsteady_layer(recompute="full")
    torch.testing.assert_close(gradients(ours, ours(x_TD)), expected)
    assert ours.router.calls == 2
    assert torch.equal(ours.load_E, plain.load_E)

    stock = unsteady_layer()
    wrong = gradients(stock, torch_checkpoint(stock, x_TD, use_reentrant=False))
    assert (wrong - expected).norm() > 0.1 * expected.norm()


def test_less_is_kept_for_the_backward() -> None:
    def kept(recompute: str) -> int:
        storages: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        layer = make_moe(DIM, 256, EXPERTS, TOP_K, activation="swiglu", recompute=recompute)  # type: ignore[arg-type]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y_TD = layer(tokens(0, 400))
            storages.pop(layer.experts.up.untyped_storage().data_ptr(), None)
            storages.pop(layer.experts.down.untyped_storage().data_ptr(), None)
        assert y_TD.requires_grad
        return sum(storages.values())

    rows = 400 * TOP_K
    wide = rows * 4 * 256 * 4  # gate, up, activation and their product, in bytes
    assert kept("none") > wide
    assert kept("selective") <= kept("none") - wide
    assert kept("full") < kept("selective") / 4


# torch.compile itself makes an instance of each autograd function that it traces, and asks tensors for their gradient.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.usefixtures("unchecked_shapes")
def test_a_compiled_model_may_recompute(recompute: str) -> None:
    gradients = []
    for layers in ("none", recompute):
        block, x_TD = Block(recompute=False, layers=layers), tokens(0)
        model = torch.compile(block, backend="eager") if layers == recompute else block
        gradients.append(torch.autograd.grad(model(x_TD).square().sum(), [x_TD, *block.parameters()]))
    torch.testing.assert_close(*gradients)


@contextmanager
def counted_exchanges() -> Iterator[list[None]]:
    """A list that grows by one with each all-to-all."""
    calls: list[None] = []
    exchange = dist.all_to_all_single

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return exchange(*args, **kwargs)

    dist.all_to_all_single = counted
    try:
        yield calls
    finally:
        dist.all_to_all_single = exchange


def steps_on_one_rank() -> dict[tuple[str, str, float | None], tuple[dict[str, Tensor], int]]:
    """Steps with experts spread over ranks, and the number of their all-to-alls."""
    found = {}
    for exchange in get_args(ExpertExchange):
        with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="1"):
            groups = make_expert_groups(dist.get_world_size(), exchange=exchange)
        for recompute in ("none", "selective", "full"):
            for factor in (None, 0.7):
                layer = layer_with(groups, recompute=recompute, capacity_factor=factor)
                with counted_exchanges() as calls:
                    found[exchange, recompute, factor] = step(layer, micro_batches=1), len(calls)
    return found


def test_between_ranks_rows_are_sent_again_and_counts_are_not() -> None:
    """Sizes, rows, results; gradients of the last two, which are sent once more where all is recomputed. By nodes twice
    as many."""
    for rank in run_distributed(steps_on_one_rank, 2):
        for (exchange, recompute, factor), (values, exchanges) in rank.items():
            torch.testing.assert_close(values, rank["flat", "none", factor][0])
            once, again = (EXCHANGES, 2) if exchange == "flat" else (2 * EXCHANGES, 4)
            assert exchanges == once + (again if recompute == "full" else 0)


def mixtral_on_one_rank() -> dict[str, tuple[dict[str, Tensor], int]]:
    """Gradients, loads and all-to-alls of a model of transformers, with and without gradient checkpointing."""
    from accelerate import Accelerator
    from transformers import AutoModelForCausalLM

    found = {}
    for name in ("kept", "recomputed"):
        torch.manual_seed(0)
        model = randomize_routers(AutoModelForCausalLM.from_config(config("mixtral"))).train()
        if name == "recomputed":
            recompute_blocks(model)
        accelerator = Accelerator(cpu=True)
        experts = ExpertParallel(accelerator)
        ids = tokens_of_step(0, 2 + dist.get_rank())
        wrapped, _ = experts.prepare(model, torch.optim.AdamW(model.parameters()))
        with counted_exchanges() as calls:
            accelerator.backward(wrapped(input_ids=ids, labels=ids).loss)
        values = {name: p.grad for name, p in model.named_parameters()}
        found[name] = values | {name: stack.log.load_E for name, stack in experts.stacks.items()}, len(calls)
    return found


def test_models_of_transformers_recompute_with_the_decisions_of_the_forward() -> None:
    for rank in run_distributed(mixtral_on_one_rank, 2):
        torch.testing.assert_close(rank["recomputed"][0], rank["kept"][0])
        assert (rank["kept"][1], rank["recomputed"][1]) == (10, 14)
