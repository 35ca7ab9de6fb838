"""Synthetic lifecycle.jsonl and metrics.jsonl of a layer with dynamic experts."""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np

from toolkit.dynamic.graph import KnowledgeGraph
from toolkit.dynamic.roster import ExpertRoster, LifecycleEvent

STEPS_PER_EPOCH = 100


def eventful() -> list[tuple[int, ExpertRoster, list[LifecycleEvent]]]:
    """Return (step, roster, events of the epoch) at the end of each of four epochs."""
    first = ExpertRoster.initial(4, 8)
    second = first.grow(4, step=120, parent=1).grow(5, step=150)
    third = second.merge(3, into=2, step=230)
    fourth = third.prune(5, step=310).grow(3, step=390, parent=4)
    undone = {"tried": ["replay"], "before": 0.1, "after": 0.2}
    events = [
        [],
        [LifecycleEvent(120, "moe", "grow", (4, 1)), LifecycleEvent(150, "moe", "grow", (5,))],
        [LifecycleEvent(230, "moe", "sleep", ()), LifecycleEvent(230, "moe", "merge", (2, 3))],
        [
            LifecycleEvent(310, "moe", "prune", (5,)),
            LifecycleEvent(360, "", "undone", (), undone),
            LifecycleEvent(390, "moe", "grow", (6, 4)),
        ],
    ]
    return list(zip((100, 200, 300, 400), (first, second, third, fourth), events, strict=True))


def write_lifecycle(folder: Path, *, ranks: int = 1, classes: int = 10) -> None:
    """Write lifecycle.jsonl and metrics.jsonl with the events of `eventful`."""
    draws = np.random.default_rng(0)
    graph, lines = KnowledgeGraph(), []
    for step, roster, events in eventful():
        graph.observe_roster(roster, step=step)
        graph.decay()
        uids = [record.uid for record in roster.active]
        together = draws.integers(0, 300, (len(uids), len(uids)))
        together = together + together.T
        seen = draws.integers(1, 60, (len(uids), classes)) + 900 * (draws.random((len(uids), classes)) < 0.15)
        np.fill_diagonal(together, seen.sum(1))
        per_rank = roster.logical_experts // ranks
        graph.observe_routing(uids, together, seen, {r.uid: r.logical_id // per_rank for r in roster.active})
        graph.observe_similarity({(0, uids[-1]): 0.7})
        layer = {
            "graph": graph.state_dict(),
            "uids_of_logical": roster.uids_of_logical,
            "logical_on_ranks": [list(range(r * per_rank, (r + 1) * per_rank)) for r in range(ranks)],
        }
        line = {"step": step, "epoch": step / STEPS_PER_EPOCH, "layers": {"moe": layer}}
        lines.append(line | {"seconds": 3.5 + draws.random(), "events": [asdict(event) for event in events]})
    (folder / "lifecycle.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    metrics = [
        {"step": s, "train/loss": 2.0 / s**0.5, "train/accuracy": 1 - 0.5 / s**0.4, "perf/step_time_ms": 2.0}
        | {"moe/load/moe": [0.3, 0.2, 0.2, s / 1000, 0.1, 0.1, 0.0, 0.0]}
        | ({"eval/loss": 2.2 / s**0.5, "eval/accuracy": 1 - 0.6 / s**0.4} if s % STEPS_PER_EPOCH == 0 else {})
        for s in range(20, 401, 20)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
