"""Imbalance from which moving experts is worthwhile, by the guard's rule and the cost model. Nothing is measured.

    python benchmarks/placement/when_moving_pays.py                a second

A plan evens out the load of one layer, and the busiest rank exchanges two experts. Experts have three matrices in
bfloat16, 12 bytes per parameter of optimizer state, and compute at 400 TFLOP/s. Plans are 200 steps apart. `steady` is
for loads that confirmed the predictions of the guard in as many windows as it counts. Writes
benchmarks/results/when_moving_pays.json.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.report import write_report
from toolkit.experts.placement.cost_model import CostModel
from toolkit.experts.placement.guard import LEAST, MARGIN, MOST_WINDOWS
from toolkit.experts.placement.placement import ExpertPlacement

EVERY, FLOPS = 200, 400e12
WIDTHS = ((2048, 768), (4096, 14336), (7168, 2048))
"""Model and hidden size of Qwen3-30B-A3B, Mixtral-8x7B and DeepSeek-V3."""
PAIRS = (1024, 8192, 65536)
"""(token, expert) pairs of a rank in a step."""
LINKS = {"PCIe, 16 GB/s": 16e9, "200 Gbit/s": 25e9, "400 Gbit/s": 50e9, "NVLink, 300 GB/s": 300e9}
BEFORE, AFTER = ExpertPlacement(((0, 1), (2, 3))), ExpertPlacement(((2, 3), (0, 1)))


def least_imbalance(cost_model: CostModel, pairs: int, windows: int) -> float:
    """Return the imbalance whose removal saves `MARGIN` migrations and `LEAST` of the time of the experts."""
    seconds = windows * EVERY * cost_model.step_seconds(np.full(4, pairs / 2), BEFORE)
    return max(1 + MARGIN * cost_model.migration_seconds(BEFORE, AFTER) / seconds, 1 / (1 - LEAST))


def main() -> None:
    rows = []
    for model, hidden in WIDTHS:
        parameters = 3 * model * hidden
        for pairs in PAIRS:
            found = {}
            for link, speed in LINKS.items():
                cost_model = CostModel(
                    seconds_per_row=6 * parameters / FLOPS,
                    bytes_per_second=speed,
                    weight_bytes=2 * parameters,
                    optimizer_bytes=12 * parameters,
                )
                for label, windows in (("", 1), (", steady", MOST_WINDOWS)):
                    found[link + label] = round(least_imbalance(cost_model, pairs, windows), 3)
            rows.append({"model size": model, "hidden size": hidden, "pairs": pairs, **found})
    write_report("when_moving_pays", rows, every=EVERY, tflops=FLOPS / 1e12, windows=MOST_WINDOWS)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
