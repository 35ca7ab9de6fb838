"""Real steps, on gloo, of a run that moves its experts beside one that does not: how much faster, and what is the most?

    python benchmarks/speed/moving_experts.py                           every load on 2 and 4 processes, half an hour
    python benchmarks/speed/moving_experts.py --loads steep --worlds 2

Two blocks of a dense network and a mixture of 16 experts, top 2, in float32; forward, backward, clipping, AdamW. Tokens
go where a draw says, by Zipf's law with the hottest experts on the first process; a plan every 8 steps, migrations
included. `drifting` loads begin alike and walk at random, in each step and layer. All contenders of a load get the same
draws, in one launch, in turns of 16 steps, whose order changes from round to round. A `control` never moves either: how
far it is from 1 is what a figure can be wrong by, and on a shared machine that was 0.1.

`eplb` is the published algorithm of DeepSeek's expert parallelism load balancer, which plans for the last window
without a look at where experts are. `oracle` stands from the beginning as one would place experts who knew the loads
that are drawn, and never moves: the most that moving can reach. Times are those of the wall, which tell something where
each process has a core of its own, and the processor time of the busiest process in each turn. Figures are ratios to
the run that never moves, of sums over all turns, with the least and the greatest of single rounds.

Writes benchmarks/results/moving_experts.json.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.placement.simulator import Block, DrawnRouter, drawn, step
from benchmarks.report import write_report
from tests.support.helpers import run_distributed
from toolkit.experts.hosts.loop.engine import ExpertParallel
from toolkit.experts.layer.moe_layer import make_moe, moe_layers
from toolkit.experts.moving.replan_options import ReplanOptions
from toolkit.experts.placement.loads import Load, rank_imbalance
from toolkit.experts.placement.placement import ExpertPlacement, contiguous, with_spare_slots
from toolkit.experts.placement.planners.simple import lpt, round_robin
from toolkit.run.process_settings import process_settings

EXPERTS, TOP_K, DIM, LAYERS, EVERY, TURN = 16, 2, 256, 2, 8, 16


@dataclass(frozen=True, kw_only=True)
class Loads:
    """How often experts are chosen."""

    skew: float
    """The exponent of Zipf's law in the first step; 0: all alike."""
    drift: float = 0.0
    """The standard deviation by which an expert's logarithm changes in a step."""
    hidden: int = 512
    tokens: int = 1024
    """In a step, over all processes."""
    rounds: int = 4
    rivals: tuple[str, ...] | None = None
    """None: all."""

    def log_popularity(self, layer: int, steps: int) -> Tensor:
        """(steps, E)"""
        begin = -self.skew * torch.arange(1.0, EXPERTS + 1).log()
        draws = torch.Generator().manual_seed(layer)
        return begin + self.drift * torch.randn(steps, EXPERTS, generator=draws).cumsum(0)


STAY, CONTROL, GUARDED = "blocks, never moved", "control", "swap"
FEWER = (STAY, CONTROL, GUARDED, "swap, no guard", "eplb, no guard")
LOADS = {
    "balanced": Loads(skew=0.0),
    "mild": Loads(skew=0.5),
    "steep": Loads(skew=1.0),
    "steep, larger": Loads(skew=1.0, hidden=1024, tokens=2048, rounds=8, rivals=FEWER),
    "drifting slowly": Loads(skew=0.5, drift=0.05),
    "drifting fast": Loads(skew=0.5, drift=0.2),
}


def eplb(load_E: Load, current: ExpertPlacement) -> ExpertPlacement:
    """Returns the placement of DeepSeek's balancer for one group of experts: each spare slot to the expert whose
    replicas have most load; then the heaviest replica first, each to the rank with the least load that has room.
    Replicas of one expert are on different ranks here, and come first."""
    load = np.asarray(load_E, dtype=float)
    replicas = np.ones(len(load), dtype=int)
    for _ in range(current.ranks * current.stride - len(load)):
        replicas[np.where(replicas < current.ranks, load / replicas, -1.0).argmax()] += 1
    loads = load / replicas
    rows: list[list[int]] = [[] for _ in range(current.ranks)]
    held = np.zeros(current.ranks)
    order = sorted(
        np.repeat(np.arange(len(load)), replicas), key=lambda expert: (replicas[expert] == 1, -loads[expert])
    )
    for expert in order:
        full = np.array([len(row) == current.stride or expert in row for row in rows])
        rank = int(np.where(full, np.inf, held).argmin())
        rows[rank].append(int(expert))
        held[rank] += loads[expert]
    return ExpertPlacement(tuple(map(tuple, rows)))


@dataclass(frozen=True, kw_only=True)
class Rival:
    """How one contender places its experts."""

    replan: ReplanOptions | None = None
    initial: str = "blocks"
    spare_slots: int = 0


def _moves(planner: Any, **options: Any) -> ReplanOptions:
    return ReplanOptions(planner=planner, every=EVERY, **options)


RIVALS = {
    STAY: Rival(),
    CONTROL: Rival(),
    "round robin, never moved": Rival(initial="round robin"),
    GUARDED: Rival(replan=_moves("swap")),
    "swap, no guard": Rival(replan=_moves("swap", guarded=False)),
    "replicate": Rival(replan=_moves("replicate"), spare_slots=1),
    "eplb, no guard": Rival(replan=_moves(eplb, guarded=False)),
    "oracle": Rival(initial="oracle"),
}


class Live:
    """A model of one contender, as a user's loop trains it."""

    def __init__(self, rival: Rival, loads: Loads, steps: int):
        from accelerate import Accelerator

        self.accelerator = Accelerator(cpu=True)
        self.world = self.accelerator.num_processes
        torch.manual_seed(0)
        sizes = (DIM, loads.hidden, EXPERTS, TOP_K)
        model = nn.Sequential(*[Block(DIM, make_moe(*sizes, router_type=DrawnRouter)) for _ in range(LAYERS)])
        names = list(moe_layers(model))
        self.logs = [loads.log_popularity(layer, steps) for layer in range(LAYERS)]
        placements = [self._initial(rival, log.mean(0)) for log in self.logs]
        self.experts = ExpertParallel(
            self.accelerator,
            ep_size=self.world,
            replan=rival.replan,
            spare_slots=rival.spare_slots,
            placement=lambda name, *_: placements[names.index(name)],
        )
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-6)
        self.layers = list(moe_layers(model).values())
        self.model, self.optimizer = self.experts.prepare(model, optimizer)
        self.x = torch.randn(loads.tokens // self.world, DIM)
        self.imbalances: list[float] = []

    def _initial(self, rival: Rival, log_popularity: Tensor) -> ExpertPlacement:
        blocks = contiguous(EXPERTS, self.world)
        load_E = drawn(log_popularity, 20_000, 0).flatten().bincount(minlength=EXPERTS).numpy()
        if rival.initial == "round robin":
            return round_robin(load_E, blocks)
        return lpt(load_E, blocks) if rival.initial == "oracle" else with_spare_slots(blocks, rival.spare_slots)

    def turn(self, first: int) -> tuple[float, float]:
        """Steps from `first` on; returns the seconds until the last process was done, and the processor time of the
        one that had most."""
        rank = dist.get_rank()
        batches = [
            [drawn(log[number], len(self.x), 1000 * number + 10 * rank + i) for i, log in enumerate(self.logs)]
            for number in range(first, first + TURN)
        ]
        dist.barrier()
        began, worked = time.perf_counter(), time.process_time()
        for ids in batches:
            for layer, ids_TK in zip(self.layers, ids, strict=True):
                layer.router.ids_TK = ids_TK
            step(self.accelerator, self.model, self.optimizer, self.x)
        busiest = torch.tensor(time.process_time() - worked, dtype=torch.float64)
        dist.barrier()
        seconds = time.perf_counter() - began
        dist.all_reduce(busiest, op=dist.ReduceOp.MAX)
        for layer in self.layers:  # where experts are after the turn, for the loads of its last step
            load_E = layer.expert_stack.log.last_load_E.clone()
            dist.all_reduce(load_E)
            self.imbalances.append(rank_imbalance(load_E, layer.expert_stack.placement))
        return seconds, float(busiest)


@process_settings()
def race(loads: Loads) -> list[dict[str, Any]]:
    """A row for each contender."""
    runs = {name: Live(RIVALS[name], loads, loads.rounds * TURN) for name in loads.rivals or RIVALS}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    names = list(runs)
    for number in range(loads.rounds):
        at = number % len(names)
        for name in names[at:] + names[:at]:
            times[name].append(runs[name].turn(number * TURN))
    rows = []
    for name, live in runs.items():
        ratios = np.array(times[STAY]) / np.array(times[name])
        wall, processor = np.array(times[STAY]).sum(0) / np.array(times[name]).sum(0)
        moved = sum(migration.report.cost.experts for migration in live.experts.migrations)
        refused = live.experts.replanner.plans_refused if live.experts.replanner else 0
        rows.append(
            {
                "contender": name,
                "imbalance": round(float(np.mean(live.imbalances)), 2),
                "ms a step": round(1e3 * float(np.mean(times[name], axis=0)[0]) / TURN, 1),
                "x, wall": round(float(wall), 3),
                "wall, of rounds": f"{ratios[:, 0].min():.2f} to {ratios[:, 0].max():.2f}",
                "x, busiest processor": round(float(processor), 3),
                "processor, of rounds": f"{ratios[:, 1].min():.2f} to {ratios[:, 1].max():.2f}",
                "experts moved": moved,
                "plans refused": refused,
            }
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--loads", nargs="+", default=list(LOADS), choices=list(LOADS))
    options = parser.parse_args()
    rows = []
    for world in options.worlds:
        for name in options.loads:
            found = run_distributed(race, world, LOADS[name], timeout_s=3000)[0]
            rows += [{"processes": world, "loads": name, "steps": LOADS[name].rounds * TURN, **row} for row in found]
            print(f"{world} processes, {name}: done", flush=True)
    write_report("moving_experts", rows, steps_of_a_turn=TURN, cores=os.cpu_count())
    return 0


if __name__ == "__main__":
    sys.exit(main())
