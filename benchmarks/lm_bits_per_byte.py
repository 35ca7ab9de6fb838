"""Bits per byte of held-out Shakespeare: the mixture beside a dense model of equal active parameters, same tokens.

    python benchmarks/lm_bits_per_byte.py                3 seeds, byte by byte: six runs of a minute on an idle CPU
    python benchmarks/lm_bits_per_byte.py --folder F     keeps the runs in F, and continues what was interrupted

Each run is `recipes/lm_moe.py` with that preset; it needs tinyshakespeare in $TOOLKIT_DATA_DIR or --data-dir. Writes a
table and benchmarks/results/lm_bits_per_byte.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.report import write_report
from recipes.lm_moe import Config, dense, full, main

ARMS = {"mixture": full, "dense": dense}


def run(config: Config) -> dict[str, Any]:
    """The results of a run that may be finished, begun, or neither."""
    assert config.run_dir is not None
    results = config.run_dir / "results.json"
    return json.loads(results.read_text()) if results.exists() else main(config)


def row(arm: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    bits = [each["test_bits_per_byte"] for each in runs]
    return {
        "arm": arm,
        "bits per byte": round(statistics.mean(bits), 4),
        "sd": round(statistics.stdev(bits), 4) if len(bits) > 1 else None,
        "each seed": [round(each, 4) for each in bits],
        "active parameters": runs[0]["active_parameters"],
        "parameters": runs[0]["parameters"],
        "tokens": runs[0]["samples"] * full().context,
        "least used expert %": round(100 * min(each["min_expert_load"] for each in runs), 1)
        if arm == "mixture"
        else None,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=None, help="folder with tinyshakespeare/input.txt")
    parser.add_argument("--folder", type=Path, default=None, help="where runs are kept; None forgets them")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        runs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
        for seed in range(args.seeds):
            for arm, preset in ARMS.items():
                config = replace(
                    preset(),
                    seed=seed,
                    dataset="tinyshakespeare",
                    data_dir=args.data_dir,
                    cpu=True,
                    tracker="none",
                    export=False,
                    checkpoint=replace(preset().checkpoint, every_steps=70),
                    run_dir=(args.folder or Path(scratch)) / f"{arm}-seed{seed}",
                )
                runs[arm].append(run(config))
    gains = [d["test_bits_per_byte"] - m["test_bits_per_byte"] for m, d in zip(*runs.values(), strict=True)]
    write_report("lm_bits_per_byte", [row(arm, each) for arm, each in runs.items()], gain_of_each_seed=gains)
