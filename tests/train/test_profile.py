"""`--profile` names where the time goes, and changes nothing; model FLOPs are those of the arithmetic."""

from __future__ import annotations

import gzip
import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import toolkit as tk
from tests.support.helpers import run_distributed
from tests.support.trainers import standard_trainer
from toolkit import compat
from toolkit.data.table import TensorTable
from toolkit.run.config.experts import MoERunConfig
from toolkit.run.tracking.jsonl import read_metrics
from toolkit.train.device_use import FORWARDS, peak_flops_of
from toolkit.train.profile import Measured, Profile, lines_of, shares_of, verdict

DIM, HIDDEN, EXPERTS, TOP_K, CLASSES = 16, 512, 4, 2, 3
FORWARD_FLOPS = 2 * (DIM * DIM + DIM * EXPERTS + TOP_K * 2 * DIM * HIDDEN + DIM * CLASSES)
"""Of a sample: a multiplication and an addition for each weight that it meets."""


def config(folder: Path, **settings: Any) -> MoERunConfig:
    some = {"batch_size": 512, "max_steps": 17, "log_every": 4, "experts": EXPERTS, "balance_weight": 0.0} | settings
    return MoERunConfig(run_dir=folder, tracker="none", cpu=True, lr=1e-3, **some)


def table() -> TensorTable:
    draws = torch.Generator().manual_seed(0)
    return TensorTable(input=torch.randn(4096, DIM, generator=draws), label=torch.arange(4096) % CLASSES)


def train(config: MoERunConfig, *, only: tuple[int, ...] = (), train_on: Any = None) -> dict[str, Any]:
    """With `only`, all tokens go to these two experts."""
    with tk.start_run("profiled", config) as run:
        moe = tk.moe_from_config(config, DIM, groups=tk.experts.make_expert_groups(run.world_size))
        if only:
            moe.router.weight.data.zero_()
            moe.router.register_forward_pre_hook(lambda _, given: (torch.cat([given[0][:, :-1], BIG(given[0])], 1),))
            moe.router.weight.data[list(only), -1] = torch.tensor([1.0, 1.1])
        model = nn.Sequential(nn.Linear(DIM, DIM), moe, nn.Linear(DIM, CLASSES))
        trainer = standard_trainer(run, tk.Classification(), model, train=train_on or table(), test=table())
        assert any(isinstance(callback, Profile) for callback in trainer.callbacks) == config.profile
        return run.finish(trainer.fit())


def BIG(x: Tensor) -> Tensor:
    return torch.full_like(x[:, :1], 30.0)


def learned(folder: Path) -> list[dict[str, Any]]:
    lines = read_metrics(folder / "metrics.jsonl")
    return [{name: value for name, value in line.items() if not name.startswith("perf/")} for line in lines]


def slowly(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    time.sleep(0.05)
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def test_a_slow_loader_is_named_and_nothing_else_changes(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    columns = table()
    rows = [{name: column[row] for name, column in columns.columns.items()} for row in range(640)]
    for name, profile in (("with", True), ("without", False)):
        loader = DataLoader(rows, batch_size=32, collate_fn=slowly)
        results = train(config(tmp_path / name, batch_size=32, profile=profile), train_on=loader)
        assert ("profile" in results) == profile
    assert learned(tmp_path / "with") == learned(tmp_path / "without")
    results = json.loads((tmp_path / "with" / "results.json").read_text())["profile"]
    assert results["cause"].startswith("input: ")
    assert results["remedy"] == "--num-workers 4"
    assert "input: " in (tmp_path / "with" / "summary.txt").read_text()
    said = capsys.readouterr().out.splitlines()
    first = next(place for place, line in enumerate(said) if line.startswith("profile of steps 11 to 15, "))
    assert [line.split()[0] for line in said[first + 1 : first + 5]] == ["compute", "exchange", "waiting", "likeliest"]
    with gzip.open(tmp_path / "with" / "profile" / "trace-rank-00000.json.gz", "rt") as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert {"data", "step", "optimizer", "aten::addmm"} <= names
    assert not (tmp_path / "without" / "profile").exists()


def test_imbalance_is_measured_and_only_active_experts_count(tmp_path: Path):
    """How long processes wait, and so the likeliest cause, is this machine's affair: the cases below judge that."""
    settings = {"expert_hidden_size": HIDDEN, "profile": True, "peak_flops": 1e9}
    results = run_distributed(imbalanced, 2, config(tmp_path, **settings))[0]
    assert results["profile"]["rank_imbalance"] == 2
    parts = results["profile"]
    shares = [parts[name] for name in ("compute", "waiting", "optimizer", "data", "other")]
    assert math.isclose(sum(shares) + sum(parts["exchange"].values()), 1, abs_tol=0.02)
    assert len(list((tmp_path / "profile").iterdir())) == 2
    for line in read_metrics(tmp_path / "metrics.jsonl"):
        rate = line["perf/model_flops_per_second"]
        assert math.isclose(rate / line["perf/samples_per_second"], FORWARDS * FORWARD_FLOPS, rel_tol=1e-6)
        assert math.isclose(line["perf/mfu"], rate / 2e9, rel_tol=1e-6)
        assert "perf/gpu_utilization" not in line


def test_what_torch_cannot_count_is_said_and_left_out(tmp_path: Path, monkeypatch, capsys):
    def refuses(*_shapes: object, **_options: object) -> int:
        raise AssertionError("shapes are incompatible")

    monkeypatch.setitem(compat.flop_registry, torch.ops.aten.mm, refuses)
    train(config(tmp_path / "run", peak_flops=1e9))
    lines = list(read_metrics(tmp_path / "run" / "metrics.jsonl"))
    assert all("perf/samples_per_second" in line for line in lines[1:])
    assert not any("perf/model_flops_per_second" in line or "perf/mfu" in line for line in lines)
    assert capsys.readouterr().out.count("left out, torch cannot count aten.mm") == 1


def imbalanced(config: MoERunConfig) -> dict[str, Any]:
    return train(config, only=(2, 3))


def measured(**changes: Any) -> Measured:
    usual = {"total": 1.0, "data": 0.0, "optimizer": 0.1, "callbacks": 0.0, "small": 0.0, "idle": 0.0, "syncs": 0}
    return Measured(**{**usual, "collectives": [], **changes})


def test_the_rank_that_comes_last_does_not_wait():
    early = measured(collectives=[("experts", 0.3), ("gradients", 0.1)])
    late = measured(collectives=[("experts", 0.1), ("gradients", 0.1)], data=0.2)
    shares, slowest = shares_of([early, late], [(0, 1)])
    assert slowest == 1
    parts = {"waiting": shares.waiting, "data": shares.data, "compute": shares.compute, **shares.exchange}
    assert {name: round(part, 6) for name, part in parts.items()} == {
        "waiting": 0.1,
        "data": 0.1,
        "compute": 0.5,
        "experts": 0.1,
        "gradients": 0.1,
    }
    # Each is an EP group by itself.
    assert shares_of([early, late])[0].waiting == 0
    assert shares_of([early, replace(late, collectives=[])])[0].waiting == 0
    # Experts travel between the first and the third, and between the others.
    assert shares_of([early, early, late, late], [(0, 2), (1, 3)])[0] == shares
    assert shares_of([early, early, late, late], [(0, 1), (2, 3)])[0].waiting == 0


@pytest.mark.parametrize(
    ("ranks", "settings", "imbalance", "says"),
    [
        ([{"data": 0.4}], {}, 1.0, "input: the step waits for its data; try --num-workers 4"),
        ([{"data": 0.4}], {"num_workers": 6}, 1.0, "try --num-workers 12"),
        (
            [{"collectives": [("gradients", s)]} for s in (0.5, 0.0)],
            {},
            1.0,
            "a slow process: the others wait for rank 1",
        ),
        (
            [{"collectives": [("experts", s)]} for s in (0.5, 0.0)],
            {},
            1.9,
            "1.90 times the mean load; try --replan.planner swap",
        ),
        (
            [{"collectives": [("gradients", 0.5)]}] * 2,
            {},
            1.0,
            "too many ranks for the batch; try a larger --batch-size",
        ),
        ([{"small": 0.9}], {"gradient_accumulation_steps": 2}, 1.0, "small batch: operations are too short; try fewer"),
        (
            [{"idle": 0.6, "syncs": 3}],
            {},
            1.0,
            "host syncs and launches: the GPU is idle 60% of the time; try --compile",
        ),
        ([{}], {}, 1.0, "compute, as it should be; try --mixed-precision bf16"),
    ],
)
def test_the_likeliest_cause_and_the_flag(
    ranks: list[dict], settings: dict, imbalance: float, says: str, tmp_path: Path
):
    everyone = [measured(**each) for each in ranks]
    shares, slowest = shares_of(everyone, [range(len(ranks))])
    cause, remedy = verdict(shares, everyone, config(tmp_path, **settings), slowest=slowest, imbalance=imbalance)
    lines = lines_of(shares, slowest, cause, remedy)
    assert len(lines) == 4
    assert says in lines[-1]


def test_chips_are_known_by_their_names():
    assert peak_flops_of("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops_of("NVIDIA H100 PCIe") == 756e12
    assert peak_flops_of("NVIDIA A100-SXM4-40GB") == 312e12
    assert peak_flops_of("NVIDIA L4") == 121e12
    assert peak_flops_of("NVIDIA L40S") == 362e12
    assert peak_flops_of("NVIDIA GeForce GTX 1080") is None
