"""Bits per byte of a new and the old text: expert adapters, attention adapters and full fine-tuning.

    python benchmarks/learning/finetune_moe.py           3 seeds at the presets' learning rates: 15 runs of 30 seconds
    python benchmarks/learning/finetune_moe.py --folder F  keep the runs in F, and resume

Each run is the preset `full` of `recipes/finetune_moe.py`, also with a bf16 base or 4-bit experts, or one of its
controls. Needs tinyshakespeare in $TOOLKIT_DATA_DIR. Writes benchmarks/results/finetune_moe.json.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes")]

from benchmarks.report import sd, write_report
from recipes.finetune_moe import Config, full, main
from toolkit.run.folder import results_of
from toolkit.run.tracking.jsonl import read_metrics

ARMS: dict[str, dict[str, Any]] = {
    "experts": {},
    "attention": {"lora_experts": False, "lr": 4e-2},
    "weights": {"lora_rank": 0, "freeze_router": False, "merge": False, "offload": None, "lr": 4e-2},
}
"""Changed settings, as in the recipe's controls."""
SMALLER: dict[str, dict[str, Any]] = {
    "in bf16": {"dtype": "bfloat16"},
    "in four bits": {"dtype": "bfloat16", "quantize": "4bit"},
}
"""Changed settings with a smaller base model."""
CURVE = (60, 120, 180, 240, 300)
"""Log steps of the training loss, each over 20 steps."""


def run(folder: Path, **changes: Any) -> dict[str, Any]:
    """Return the results of a run; start or resume it if it is unfinished."""
    usual: dict[str, Any] = {"compare": False, "cpu": True, "tracker": "none", "run_dir": folder}
    config: Config = full().replace(**{**usual, **changes})
    return results_of(folder) or main(config)


def row(trained: str, runs: list[dict[str, Any]], parameters: int, when: str = "") -> dict[str, Any]:
    new, old = ([each[f"{text}_bits_per_byte{when}"] for each in runs] for text in ("test", "old"))
    return {
        "trained": trained,
        "parameters": parameters,
        "new text": round(statistics.mean(new), 4),
        "new sd": sd(new, 4),
        "old text": round(statistics.mean(old), 4),
        "old sd": sd(old, 4),
        "new of each seed": [round(each, 4) for each in new],
        "old of each seed": [round(each, 4) for each in old],
        "steps": runs[0]["steps"],
    }


def curve(folder: Path, arm: str, seeds: int) -> list[float]:
    """Return the training loss at the steps of `CURVE`, as means over seeds."""
    logs = [read_metrics(folder / f"{arm}-seed{seed}" / "metrics.jsonl") for seed in range(seeds)]
    losses = [{line["step"]: line["train/loss"] for line in log if "train/loss" in line} for log in logs]
    return [round(statistics.mean(each[step] for each in losses), 3) for step in CURVE]


def compare(folder: Path, seeds: int) -> None:
    """Write a row for the base model and each arm."""
    runs = {
        arm: [run(folder / f"{arm}-seed{seed}", **changes, seed=seed) for seed in range(seeds)]
        for arm, changes in (ARMS | SMALLER).items()
    }
    first = next(iter(runs.values()))
    rows = [row("nothing", first[:1], 0, "_at_start") | {"curve": None}]
    for arm, each in runs.items():
        trained = each[0]["trained"] + (f", {arm}" if arm in SMALLER else "")
        rows.append(row(trained, each, each[0]["trained_parameters"]) | {"curve": curve(folder, arm, seeds)})
    write_report("finetune_moe", rows, seeds=seeds)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=None, help="folder of the runs. Default: a temporary folder")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        compare(args.folder or Path(scratch), args.seeds)
