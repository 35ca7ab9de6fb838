"""Parameter groups of routers, experts and other parameters."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.integrations.peft.models import adapted, base
from toolkit.errors import UserError
from toolkit.experts.layer.moe_layer import make_moe
from toolkit.experts.sharding.parameter_groups import parameter_groups

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


def test_parameter_groups_of_an_unknown_part_raises():
    with pytest.raises(UserError, match="take one of router, experts, rest"):
        parameter_groups(base("mixtral"), freeze="gate")  # type: ignore[arg-type]
