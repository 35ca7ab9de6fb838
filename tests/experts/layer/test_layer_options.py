"""Flags of router, losses, capacity and recomputation in runs of a recipe, on one and two processes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.support.precision import IN_FLOAT64, in_float64
from benchmarks.support.processes import run_distributed
from recipes.mnist_moe import Config, debug, main
from toolkit.experts.layer.router_options import RouterOptions
from toolkit.experts.parallel.groups import make_expert_groups
from toolkit.run.tracking.jsonl import read_metrics
from toolkit.train.models.moe import moe_from_config

BIAS = {"router_score": "sigmoid", "routed_scaling": 2.0, "balance": "bias"}
CASES: dict[str, dict[str, Any]] = {
    "bias balancing": BIAS | {"gradient_accumulation_steps": 2},
    "capacity": {"capacity_factor": 0.9, "z_weight": 0.01},
    "capacity, accumulated": {"capacity_factor": 0.8, "gradient_accumulation_steps": 2},
}
COMPARED = ("train/loss", "train/penalty", "train/grad_norm", "moe/dropped_fraction", "eval/loss")


def curves(folder: Path, recompute: str) -> dict[str, list[float]]:
    """Return the logged values of each case at every step; check that drops are logged with a capacity only."""
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {}
    for name, settings in CASES.items():
        run_dir = folder / name
        common: dict[str, Any] = {"tracker": "none", "cpu": True, "max_steps": 5, "log_every": 1, "run_dir": run_dir}
        with in_float64():
            main(debug().replace(**common, **settings, recompute=recompute))
        lines = list(read_metrics(run_dir / "metrics.jsonl"))
        found[name] = [line[key] for line in lines for key in COMPARED if key in line]
        assert any("moe/dropped_fraction" in line for line in lines) == ("capacity_factor" in settings)
    return found


def test_expert_parallel_recomputed_runs_equal_one_process(tmp_path: Path) -> None:
    (single,) = run_distributed(curves, 1, tmp_path / "single", "none")
    sharded, _ = run_distributed(curves, 2, tmp_path / "sharded", "full")
    for name in CASES:
        assert sharded[name] == pytest.approx(single[name], rel=IN_FLOAT64), name
    assert len({tuple(losses) for losses in single.values()}) == len(CASES), "the flags have no effect"


def test_moe_from_config_passes_the_flags_to_the_layer() -> None:
    config = Config(router_score="sigmoid", routed_scaling=2.0, capacity_factor=1.25)
    layer = moe_from_config(config, 8, groups=make_expert_groups(1))
    assert layer.router.options == RouterOptions(router_score="sigmoid", routed_scaling=2.0)
    assert layer.capacity_factor == 1.25
