"""Sharded experts in wrappers, in evaluation mode, with shared parameters and uneven calls. Parameter groups."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.support.processes import run_distributed
from tests.integrations.accelerate.toy import Toy, ToyLoop, samples
from tests.integrations.peft.models import adapted, base
from tests.parity.models import RoutedExperts
from tests.parity.outcome import Rows, gathered, rows_by_id
from tests.support.equality import assert_equal_rows
from toolkit import experts
from toolkit.errors import UserError
from toolkit.experts.layer.moe_layer import make_moe
from toolkit.experts.sharding.join import join_forwards
from toolkit.experts.sharding.parameter_groups import parameter_groups

EXPERTS, DIM, TOKENS = 4, 6, 16


@pytest.mark.parametrize("place", ["router", "moe", "view"])
def test_shard_experts_raises_for_parameters_shared_with_a_router(place: str):
    if place == "moe":
        layer = experts.make_moe(DIM, 8, EXPERTS, 2)
        model: Any = nn.Sequential(layer)
        layer.router.table = layer.experts.up
    else:
        model = RoutedExperts(EXPERTS, DIM)
        table = model.experts.up
        model.gate.table = nn.Parameter(table.data) if place == "view" else table
    before = [dict(vars(module)) for module in model.modules()]
    with pytest.raises(UserError, match=r"share a parameter with '.*(gate|router)\.table'"):
        experts.shard_experts(model, experts.make_expert_groups(1))
    assert [dict(vars(module)) for module in model.modules()] == before


def join_with_weights(dtype: torch.dtype) -> int:
    model, calls = RoutedExperts(EXPERTS, DIM), 1 + 2 * dist.get_rank()
    experts.shard_experts(model, experts.make_expert_groups(2))
    with join_forwards([model.experts], [model.experts.expert_stack]):
        for _ in range(calls):
            model.experts(torch.randn(3, DIM), torch.tensor([[0, 3]] * 3), torch.ones(3, 2, dtype=dtype))
    return calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_join_supports_routing_weights_of_any_dtype(dtype: torch.dtype):
    assert run_distributed(join_with_weights, 2, dtype) == [1, 3]


def test_sharded_model_in_eval_mode_counts_forward_passes_with_gradients():
    model = nn.ModuleList([RoutedExperts(EXPERTS, DIM), experts.make_moe(DIM, 8, EXPERTS, 2)]).eval()
    stacks = experts.shard_experts(model)
    for block in model:
        block(torch.randn(TOKENS, DIM))
        with torch.no_grad():
            block(torch.randn(TOKENS, DIM))
    assert [int(stack.log.load_E.sum()) for stack in stacks.values()] == [2 * TOKENS, 2 * TOKENS]


class SavedModule(nn.Module):
    """PEFT's `modules_to_save`: a frozen original and a trained copy, which provides the attributes."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.modules_to_save = nn.ModuleDict({"default": copy.deepcopy(module)})
        self.original_module = module.requires_grad_(False)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._modules["modules_to_save"]["default"], name)  # type: ignore[index]

    def forward(self, *args: Any) -> Tensor:
        return self.modules_to_save["default"](*args)


WRAPPERS = {
    "frozen until prepared": lambda module: module.requires_grad_(False),
    "modules_to_save": SavedModule,
    "compiled": lambda module: torch.compile(module, backend="eager"),
    "compiled model": lambda module: module,
}


def gradients() -> dict[str, Rows]:
    """Return the gradients of one backward pass, by wrapper, parameter and row id."""
    torch.compiler.set_stance("force_eager")  # only the wrapper of torch.compile matters
    found = {}
    for name, wrap in WRAPPERS.items():
        model = Toy()
        for block in model.blocks:
            block.moe.experts = wrap(block.moe.experts)
        loop = ToyLoop(model=torch.compile(model, backend="eager") if name == "compiled model" else model)
        if name == "frozen until prepared":
            model.requires_grad_(True)
        loop.backward(samples())
        found[name] = gathered(rows_by_id(model, lambda p: torch.zeros_like(p) if p.grad is None else p.grad))
    return found


def test_gradients_of_wrapped_and_unfrozen_experts_equal_one_process() -> None:
    (expected,) = run_distributed(gradients, 1)
    ranks = run_distributed(gradients, 2)
    for wrapper, rows in expected.items():
        assert any(value.any() for name, value in rows.items() if "experts" in name)
        assert_equal_rows(gathered([rank[wrapper] for rank in ranks]), rows, 1e-10)


def test_shard_experts_raises_for_sharded_and_for_shared_experts() -> None:
    sharded, shared = Toy(), Toy()
    experts.shard_experts(sharded)
    shared.blocks[1].moe.experts.up = shared.blocks[0].moe.experts.up
    for model, message in ((sharded, "'blocks.0.moe.experts' are sharded already"), (shared, "share a parameter")):
        with pytest.raises(UserError, match=message):
            experts.shard_experts(model)


RATES: dict[str, Any] = {
    "router": {"lr": 3e-2, "weight_decay": 0.0},
    "experts": {"lr": 1e-2, "weight_decay": 0.1},
    "rest": {"lr": 1e-3},
}
ADAPTERS = {
    "target_modules": ["q_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"],
}


def with_make_moe() -> nn.Module:
    return nn.ModuleDict({"embed": nn.Embedding(64, 8), "moe": make_moe(8, 8, 8, 2, shared_expert=nn.Linear(8, 8))})


def part_of(name: str) -> str:
    """Return the part of a parameter of these models."""
    if "shared" in name:
        return "rest"
    if "experts" in name:
        return "experts"
    return "router" if "gate." in name or "router." in name else "rest"


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # raised by PEFT
@pytest.mark.parametrize(
    ("build", "frozen"),
    [
        (lambda: base("mixtral"), ()),
        (lambda: base("gpt_oss"), ("router",)),
        (lambda: adapted("qwen3_moe", **ADAPTERS), ()),
        (lambda: adapted("mixtral", **ADAPTERS), ("experts",)),
        (with_make_moe, "router"),
    ],
    ids=["mixtral", "gpt_oss", "adapted qwen3_moe", "adapted mixtral", "make_moe"],
)
def test_parameter_groups_have_all_trainable_parameters_of_their_part(build: Any, frozen: Any):
    model = build()
    names = {p: name for name, p in model.named_parameters()}
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(parameter_groups(model, **RATES, freeze=frozen))
    trained = [part for part in RATES if part not in frozen]
    groups = {group["name"]: SimpleNamespace(**group) for group in optimizer.param_groups}
    assert list(groups) == trained
    for part, group in groups.items():
        assert {names[p] for p in group.params} == {name for name in trainable if part_of(name) == part}
        assert (group.lr, group.weight_decay) == (RATES[part]["lr"], RATES[part].get("weight_decay", 0.01))
    assert {part_of(name) for name, p in model.named_parameters() if p.requires_grad} == set(trained)


def counted_before_and_after_sharding() -> str:
    """Return the table of adapters of one matrix, which sharding does not change."""
    model = adapted("gpt_oss", target_parameters=["mlp.experts.down_proj"])
    model.base_model.model.model.layers[1].mlp.experts.base_layer.gate_up_proj.requires_grad_(True)
    trained = [p for name, p in model.named_parameters() if p.requires_grad and ".experts." in name]
    counted, table = experts.trainable_experts(model), experts.make_moe(8, 8, 8, 2)
    assert sum(each.trainable for each in counted) == sum(p.numel() for p in trained)
    assert counted[0].layer == "base_model.model.model.layers.0.mlp.experts"
    for each in (model, table):
        before = experts.trainable_experts(each)
        experts.shard_experts(each, experts.make_expert_groups(2))
        assert experts.trainable_experts(each) == before
    return str(counted)


def test_trainable_experts_counts_over_all_ranks():
    expected = """\
experts            layers      parameters       trainable
gate_up_proj            1           6,144               0  frozen
gate_up_proj_bias       2             768               0  frozen
down_proj               2           6,144           1,920  adapters of rank 3
down_proj_bias          2             256               0  frozen
gate_up_proj            1           6,144           6,144  trained"""
    assert run_distributed(counted_before_and_after_sharding, 2) == [expected] * 2


def test_parameter_groups_of_an_unknown_part_raises():
    with pytest.raises(UserError, match="take one of router, experts, rest"):
        parameter_groups(base("mixtral"), freeze="gate")  # type: ignore[arg-type]
