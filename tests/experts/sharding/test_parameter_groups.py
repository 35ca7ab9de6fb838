"""Routers, experts and the rest learn at their own rates or are frozen, on two processes as on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.integrations.peft.models import adapted, base, rows
from tests.integrations.transformers.families import tokens
from tests.support.equality import assert_equal_rows, in_float64
from tests.support.helpers import run_distributed
from toolkit.errors import UserError
from toolkit.experts.layer.moe_layer import make_moe
from toolkit.experts.moving.replan_options import ReplanOptions
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
    ("ours", "", ("router",)),
]
EVERYWHERE = {
    "target_modules": ["q_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"],
}


class Ours(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 8), nn.Linear(8, 64)
        self.mixture = make_moe(8, 8, 8, 2, shared_expert=nn.Linear(8, 8))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = self.head(self.mixture(self.embed(input_ids)))
        return type("Output", (), {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())})


def build(kind: str, family: str) -> Any:
    torch.manual_seed(0)
    if kind == "ours":
        return Ours()
    return adapted(family, **EVERYWHERE) if kind == "adapted" else base(family)


def part_by_name(name: str) -> str:
    """Of a parameter of these models, spelled out a second time."""
    if "shared" in name:
        return "rest"
    if "experts" in name:
        return "experts"
    return "router" if "gate." in name or "router." in name else "rest"


def prepared(kind: str, family: str, frozen: tuple[str, ...]) -> tuple[Any, Any, Any, ExpertParallel]:
    from accelerate import Accelerator

    model = build(kind, family)
    rates = {part: settings for part, settings in RATES.items() if part not in frozen}
    optimizer: Any = torch.optim.AdamW(parameter_groups(model, **rates, freeze=frozen))
    # Some tokens of a step may all go to experts of one rank, and a router that is frozen alike on all has no gradient.
    experts = ExpertParallel(Accelerator(cpu=True), replan=ReplanOptions(planner="lpt", every=1, guarded=False))
    wrapped, optimizer = experts.prepare(model, optimizer)
    return model, wrapped, optimizer, experts


def train(folder: Path) -> list[dict[str, Any]]:
    """Steps, a checkpoint, and steps of another model that goes on from it: rows, rates, and what still learns."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    found = []
    with in_float64():
        for number, (kind, family, frozen) in enumerate(CASES):
            before = {}
            for begins in (True, False):
                model, wrapped, optimizer, experts = prepared(kind, family, frozen)
                before = before or rows(model)
                if not begins:
                    experts.load(folder / f"{world} {number}")
                for step in range(STEPS):
                    ids = tokens(step + STEPS * begins, SAMPLES)[rank * SAMPLES // world :][: SAMPLES // world]
                    experts.accelerator.backward(wrapped(input_ids=ids, labels=ids).loss)
                    optimizer.step()
                    optimizer.zero_grad()
                if begins:
                    experts.save(folder / f"{world} {number}")
            found.append(
                {
                    "rows": rows(model),
                    "before": before,
                    "groups": {group["name"]: (group["lr"], group["weight_decay"]) for group in optimizer.param_groups},
                    "learning": [name for name, p in model.named_parameters() if p.requires_grad],
                    "moved": sum(migration.report.cost.experts for migration in experts.migrations),
                }
            )
    return found


def test_parameter_groups_learn_at_their_rates_wherever_experts_are(tmp_path: Path):
    (alone,) = run_distributed(train, 1, tmp_path)
    for case, expected, *ranks in zip(CASES, alone, *run_distributed(train, 2, tmp_path), strict=True):
        _, _, frozen = case
        first, second = ranks
        assert first["moved"] > 0, "nothing moved, so nothing was shown"
        together = {name: row for rank in ranks for name, row in rank["rows"].items()}
        assert_equal_rows(together, expected["rows"], 1e-6)
        changed = {
            part_by_name(n) for n, row in expected["rows"].items() if not torch.equal(row, expected["before"][n])
        }
        assert changed == {"router", "experts", "rest"} - set(frozen), case
        assert first["groups"].keys() == changed
        for name, (rate, decay) in first["groups"].items():
            assert (rate, decay) == (RATES[name]["lr"], RATES[name].get("weight_decay", 0.01))
        for rank in (first, second, expected):
            assert {part_by_name(name) for name in rank["learning"]} == changed


def test_parameter_groups_of_an_unknown_part_raises():
    with pytest.raises(UserError, match="take one of router, experts, rest"):
        parameter_groups(base("mixtral"), freeze="gate")  # type: ignore[arg-type]
