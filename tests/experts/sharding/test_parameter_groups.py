"""Routers, experts and other parameters with separate rates or frozen, on one and two processes."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from benchmarks.support.families import tokens
from benchmarks.support.precision import in_float64
from benchmarks.support.processes import run_distributed
from tests.integrations.peft.models import adapted, base, rows
from tests.support.equality import assert_equal_rows
from toolkit.errors import UserError
from toolkit.experts.layer.moe_layer import make_moe
from toolkit.experts.moving.replan_options import ReplanOptions
from toolkit.experts.parallel import collectives
from toolkit.experts.sharding.parameter_groups import parameter_groups
from toolkit.integrations.accelerate.expert_parallel import ExpertParallel

STEPS, SAMPLES = 2, 4
RATES: dict[str, Any] = {
    "router": {"lr": 3e-2, "weight_decay": 0.0},
    "experts": {"lr": 1e-2, "weight_decay": 0.1},
    "rest": {"lr": 1e-3},
}
CASES: list[tuple[str, str, tuple[str, ...]]] = [
    ("base", "mixtral", ()),
    ("base", "gpt_oss", ("router",)),
    ("adapted", "qwen3_moe", ()),
    ("adapted", "mixtral", ("experts",)),
    ("make_moe", "", ("router",)),
]
"""(kind of model, family, frozen parts)."""
ADAPTERS = {
    "target_modules": ["q_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"],
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 8), nn.Linear(8, 64)
        self.moe = make_moe(8, 8, 8, 2, shared_expert=nn.Linear(8, 8))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = self.head(self.moe(self.embed(input_ids)))
        return SimpleNamespace(loss=nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))


def build(kind: str, family: str) -> Any:
    torch.manual_seed(0)
    if kind == "make_moe":
        return Model()
    return adapted(family, **ADAPTERS) if kind == "adapted" else base(family)


def part_of(name: str) -> str:
    """Return the part of a parameter of these models."""
    if "shared" in name:
        return "rest"
    if "experts" in name:
        return "experts"
    return "router" if "gate." in name or "router." in name else "rest"


def train(folder: Path) -> list[dict[str, Any]]:
    """Train each case, and continue from a checkpoint in another model; return rows, rates and trainable names."""
    world, rank, found = collectives.world_size(), collectives.rank(), []
    with in_float64():
        for number, (kind, family, frozen) in enumerate(CASES):
            before = {}
            for first in (True, False):
                model = build(kind, family)
                before = before or rows(model)
                rates = {part: settings for part, settings in RATES.items() if part not in frozen}
                optimizer = torch.optim.AdamW(parameter_groups(model, **rates, freeze=frozen))
                replan = ReplanOptions(planner="lpt", every=1, guarded=False)
                experts = ExpertParallel(Accelerator(cpu=True), replan=replan)
                wrapped, optimizer = experts.prepare(model, optimizer)
                if not first:
                    experts.load(folder / f"{world} {number}")
                for step in range(STEPS):
                    ids = tokens(step + STEPS * first, SAMPLES).chunk(world)[rank]
                    experts.accelerator.backward(wrapped(input_ids=ids, labels=ids).loss)
                    optimizer.step()
                    optimizer.zero_grad()
                if first:
                    experts.save(folder / f"{world} {number}")
            found.append(
                {
                    "rows": rows(model),
                    "before": before,
                    "groups": {group["name"]: (group["lr"], group["weight_decay"]) for group in optimizer.param_groups},
                    "trainable": [name for name, p in model.named_parameters() if p.requires_grad],
                    "migrated": sum(migration.report.cost.experts for migration in experts.migrations),
                }
            )
    return found


def test_parameter_groups_keep_their_rates_on_two_processes(tmp_path: Path):
    (single,) = run_distributed(train, 1, tmp_path)
    for (*_, frozen), expected, *ranks in zip(CASES, single, *run_distributed(train, 2, tmp_path), strict=True):
        assert ranks[0]["migrated"] > 0
        found = {name: row for rank in ranks for name, row in rank["rows"].items()}
        assert_equal_rows(found, expected["rows"], 1e-6)
        changed = {part_of(n) for n, row in expected["rows"].items() if not torch.equal(row, expected["before"][n])}
        assert changed == {"router", "experts", "rest"} - set(frozen)
        groups = {part: (RATES[part]["lr"], RATES[part].get("weight_decay", 0.01)) for part in changed}
        assert ranks[0]["groups"] == groups
        for rank in (*ranks, expected):
            assert {part_of(name) for name in rank["trainable"]} == changed


def test_parameter_groups_of_an_unknown_part_raises():
    with pytest.raises(UserError, match="take one of router, experts, rest"):
        parameter_groups(base("mixtral"), freeze="gate")  # type: ignore[arg-type]
