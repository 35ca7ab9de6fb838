"""Checks of arguments."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn

import toolkit as tk
from toolkit.experts import ExpertGroups, ExpertPlacement, ReplanOptions, place_experts, register_planner, shard_experts
from toolkit.experts.layer.router_options import RouterOptions

make_moe = partial(tk.experts.make_moe, dim=8, hidden_dim=4, num_experts=4, top_k=2)
MODEL = nn.Sequential(make_moe())
PLACEMENT = MODEL[0].placement
ADAM = torch.optim.AdamW(MODEL.parameters())
TABLE = tk.TensorTable(input=torch.zeros(4, 4), label=torch.zeros(4, dtype=torch.int64))
CONFIG = tk.RunConfig(cpu=True, tracker="none", max_steps=1)


def parallel(**given: Any) -> tk.ExpertParallel:
    return tk.ExpertParallel(**{"accelerator": Accelerator(cpu=True)} | given)


def prepare(**given: Any) -> Any:
    return parallel().prepare(*given.get("objects", given.values()))


def after_step(planner: Any) -> Any:
    options = ReplanOptions(planner=planner, every=1, guarded=False)
    return tk.experts.Replanner({"0": MODEL[0].expert_stack}, options).after_step(1, ADAM)


def fit(**given: Any) -> Any:
    with tk.start_run("toy", CONFIG) as run:
        parts = {"run": run, "task": tk.Classification(), "model": MODEL, "optimizer": ADAM}
        return tk.fit(**parts | {"data": tk.Splits(TABLE, TABLE)} | given)


def nothing(*_: Any) -> None: ...


VALID: dict[Any, dict[str, Any]] = {
    shard_experts: {"model": MODEL},
    place_experts: {"model": MODEL, "placement": PLACEMENT, "optimizer": None},
    tk.start_run: {"name": "toy", "config": CONFIG},
}
WRONG: list[tuple[Any, ...]] = [
    (parallel, "accelerator", Accelerator, MODEL, None),
    (parallel, "ep_size", 0, "2"),
    (parallel, "groups", 2, [[0]]),
    (parallel, "replan", {"planner": "swap"}, "swap", ReplanOptions, ReplanOptions()),
    (parallel, "spare_slots", -1, "1"),
    (parallel, "placement", 3, PLACEMENT),
    (prepare, "objects", [], [ADAM], [[MODEL, ADAM]], [nn.Linear, ADAM], [MODEL, torch.optim.AdamW]),
    (prepare, "model", nn.Sequential(make_moe()).to("meta")),
    (shard_experts, "model", nn.Linear, {"model": MODEL}, ExpertGroups(), None, make_moe().to("meta")),
    *((call, "groups", 2, MODEL) for call in (make_moe, shard_experts)),
    *((call, "spare_slots", -1, "1") for call in (make_moe, shard_experts)),
    (shard_experts, "placement", None, PLACEMENT, {"0": PLACEMENT}, nothing, "spiral"),
    *((make_moe, name, 0, 8.0, "2") for name in ("dim", "hidden_dim", "num_experts", "top_k")),
    (make_moe, "placement", None, [[0, 1, 2, 3]], "spiral"),
    *((make_moe, name, "spiral") for name in ("activation", "recompute")),
    (tk.experts.make_expert_groups, "exchange", "spiral"),
    (make_moe, "shared_expert", nn.Linear),
    (make_moe, "capacity_factor", "1.5"),
    (make_moe, "router", {"balance": "none"}, RouterOptions),
    *((make_moe, name, "softmax", MODEL) for name in ("router_type", "expert_type")),
    (make_moe, "seed", None),
    (place_experts, "model", PLACEMENT, nn.Linear),
    (place_experts, "placement", None, "swap", [[0, 1, 2, 3]], {"0": None}, {"1": PLACEMENT}),
    (place_experts, "optimizer", torch.optim.AdamW, MODEL),
    (ReplanOptions, "planner", 3, ExpertPlacement),
    (ReplanOptions, "every", "often"),
    (after_step, "planner", nothing, lambda *_: [[0, 1, 2, 3]]),
    (register_planner, "name", nothing, None),
    (fit, "run", CONFIG, tk.Run),
    (fit, "task", tk.Classification, MODEL),
    (fit, "model", tk.MLP, tk.Classification()),
    (fit, "optimizer", torch.optim.AdamW, MODEL),
    (fit, "data", None, [1, 2]),
    (fit, "schedule", "cosine"),
    (fit, "callbacks", tk.Callback(), [tk.Callback]),
    (tk.start_run, "name", CONFIG, None),
    (tk.start_run, "config", "toy", tk.RunConfig, {"lr": 0.1}, None),
]


@pytest.mark.parametrize(("call", "name", "value"), [(*row[:2], value) for row in WRONG for value in row[2:]])
def test_wrong_type_raises_before_a_change(
    call: Any, name: str, value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(tk.UserError, match=rf"^{name}\b"):
        call(**VALID.get(call, {}) | {name: value})
    assert MODEL[0].placement == PLACEMENT
    assert not hasattr(MODEL, "inputs_are_watched")
