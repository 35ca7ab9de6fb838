"""What replayed routes keep of a mixture whose routers have changed: flipped choices and KL divergence, by family.

    python benchmarks/speed/router_replay.py           every family of transformers with a top-k router, a minute or two
    python benchmarks/speed/router_replay.py --rehearse  our own layers only, nothing written

Small models with random weights in float64, 3 sequences of 10 tokens. The routers' weights are then moved by normal
noise of 0.3 of their mean size. `flips` is the share of assignments whose expert is not among the token's recorded
ones; KL is the mean over tokens of that from the first model's output distribution to the changed one's, in nats: anew,
and with the first model's routes replayed. `gradient difference` is the largest relative one of a parameter between the
recorded forward and its replay, with the same weights. Writes benchmarks/results/router_replay.json; exit code 1 where
an assignment flips under replay, or a gradient differs by more than 1e-6.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.report import write_report
from benchmarks.support.families import moe_families, supports_float64
from benchmarks.support.precision import in_float64, relative_difference
from tests.experts.sharding.test_router_replay import ROUTERS, gradients, kl, logits, make, perturb, tokens
from toolkit.errors import UserError
from toolkit.experts.sharding.router_replay import record_routes, replay_routes


def measure(name: str) -> dict[str, Any]:
    model, ids = make(name).eval(), tokens()
    with record_routes(model) as routes:
        recorded = gradients(model, ids)
    with replay_routes(model, routes):
        replayed = gradients(model, ids)
    difference = max(relative_difference(replayed[key], value) for key, value in recorded.items() if value.norm() > 0)
    served = logits(model, ids).detach()
    perturb(model)
    with record_routes(model) as anew:
        changed = logits(model, ids)
    with replay_routes(model, routes), record_routes(model) as again:
        kept = logits(model, ids)
    return {
        "family": {"softmax": "our layers, softmax", "sigmoid": "our layers, sigmoid and groups"}.get(name, name),
        "flips %": round(100 * anew.flipped(routes), 1),
        "KL": round(kl(served, changed), 5),
        "flips under replay": again.flipped(routes),
        "KL under replay": round(kl(served, kept), 5),
        "gradient difference": difference,
    }


def main() -> int:
    from transformers.utils import logging

    logging.set_verbosity_error()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true")
    arguments = parser.parse_args()
    rows, refused = [], {}
    for name in [*ROUTERS, *([] if arguments.rehearse else sorted(moe_families()))]:
        with in_float64() if name in ROUTERS or supports_float64(name, tokens()) else nullcontext():
            try:
                rows.append(measure(name))
            except UserError as error:
                refused[name] = str(error)
    if arguments.rehearse:
        print(*rows, sep="\n")
        return 0
    ratios = [row["KL"] / row["KL under replay"] for row in rows if row["KL under replay"] > 0]
    write_report(
        "router_replay",
        rows,
        refused=refused,
        families=len(rows) - len(ROUTERS),
        median_flips_percent=round(median(row["flips %"] for row in rows), 1),
        median_kl_ratio=round(median(ratios), 1),
    )
    faithful = all(row["flips under replay"] == 0 and row["gradient difference"] < 1e-6 for row in rows)
    return 0 if faithful else 1


if __name__ == "__main__":
    sys.exit(main())
