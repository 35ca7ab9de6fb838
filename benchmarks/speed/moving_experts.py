"""Real steps, on gloo, of a run that moves its experts beside one that does not: how much faster, and what is the most?

    python benchmarks/speed/moving_experts.py                           every load on 2 and 4 processes, an hour
    python benchmarks/speed/moving_experts.py --loads steep --worlds 2

Two blocks of a dense network and a mixture of 16 experts, top 2, in float32; forward, backward, clipping, AdamW. Tokens
go where a draw says, by Zipf's law with the hottest experts on the first process, or as often as in a language model
without balance (`recorded`, of `record_traces.py`; needs $TOOLKIT_DATA_DIR); a plan every 8 steps, migrations included.
`drifting` loads walk at random, in each step and layer. All contenders of a load get the same draws, in one launch, in
turns of 16 steps. Each round has new models and other draws, and both the order in which models are made and that of
turns change from round to round: which memory a model gets is worth up to 0.1, and the first one made is the slowest.
A `control` never moves either: how far it is from 1 is what a figure can be wrong by.

`eplb` is the published algorithm of DeepSeek's expert parallelism load balancer, which plans for the last window
without a look at where experts are. `oracle` stands from the beginning as one would place experts who knew the loads
that are drawn, and never moves: the most that moving can reach. Times are those of the wall, which tell something where
each process has a core of its own, and the processor time of the busiest process in each turn. Figures are medians over
rounds of the ratio to the run that never moves, of sums over the turns of a round, with the least and the greatest.

Writes benchmarks/results/moving_experts.json.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.placement.record_traces import language_model
from benchmarks.placement.simulator import Block, DrawnRouter, drawn, step
from benchmarks.report import write_report
from tests.support.helpers import run_distributed
from toolkit.experts.layer.moe_layer import make_moe, moe_layers
from toolkit.experts.moving.replan_options import ReplanOptions
from toolkit.experts.placement.loads import Load, rank_imbalance
from toolkit.experts.placement.placement import ExpertPlacement, contiguous, with_spare_slots
from toolkit.experts.placement.planners.simple import lpt, round_robin
from toolkit.experts.routing.traces import read_trace
from toolkit.integrations.accelerate.expert_parallel import ExpertParallel
from toolkit.run.process_settings import process_settings

EXPERTS, TOP_K, DIM, LAYERS, EVERY, TURN, TURNS = 16, 2, 256, 2, 8, 16, 5
STEPS = TURNS * TURN
"""Of a round."""


@dataclass(frozen=True, kw_only=True)
class Loads:
    """How often experts are chosen."""

    skew: float = 0.0
    """The exponent of Zipf's law in the first step; 0: all alike."""
    drift: float = 0.0
    """The standard deviation by which an expert's logarithm changes in a step."""
    recorded: bool = False
    """As often as in a recorded run, in place of a law."""
    hidden: int = 512
    tokens: int = 1024
    """In a step, over all processes."""
    rivals: tuple[str, ...] | None = None
    """None: all."""

    def log_popularity(self, seed: int) -> Tensor:
        """(steps of a round, layers, E)"""
        if self.recorded:
            return _recorded(seed)
        begin = -self.skew * torch.arange(1.0, EXPERTS + 1).log()
        draws = torch.Generator().manual_seed(seed)
        return begin + self.drift * torch.randn(STEPS, LAYERS, EXPERTS, generator=draws).cumsum(0)


def _recorded(seed: int) -> Tensor:
    """The last steps of a language model that was trained without balance."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.npz"
        language_model(path, seed, balance_weight=0.0, steps=100 + STEPS)
        load_TLE = torch.from_numpy(read_trace(path).load_TLSE()[-STEPS:].sum(2))
    return (load_TLE + 0.5).log()


STAY, CONTROL, GUARDED = "blocks, never moved", "control", "swap"
FEWER = (STAY, CONTROL, GUARDED, "swap, no guard", "eplb, no guard")
LOADS = {
    "steep, larger": Loads(skew=1.0, hidden=1024, tokens=2048, rivals=FEWER),
    "steep": Loads(skew=1.0),
    "balanced": Loads(rivals=FEWER),
    "drifting": Loads(skew=0.5, drift=0.1, rivals=FEWER),
    "mild": Loads(skew=0.5, rivals=FEWER),
    "recorded": Loads(recorded=True, rivals=FEWER),
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

    def __init__(self, rival: Rival, loads: Loads, log_popularity: Tensor, seed: int):
        from accelerate import Accelerator

        self.accelerator = Accelerator(cpu=True)
        self.world = self.accelerator.num_processes
        torch.manual_seed(0)
        sizes = (DIM, loads.hidden, EXPERTS, TOP_K)
        model = nn.Sequential(*[Block(DIM, make_moe(*sizes, router_type=DrawnRouter)) for _ in range(LAYERS)])
        names = list(moe_layers(model))
        self.log_popularity, self.seed = log_popularity, seed
        placements = [self._initial(rival, log) for log in log_popularity.mean(0)]
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

    def turn(self, number: int) -> tuple[float, float]:
        """A turn's steps; returns the seconds until the last process was done, and the processor time of the one that
        had most."""
        source = STEPS * (self.seed * self.world + dist.get_rank())
        batches = [
            [drawn(log, len(self.x), LAYERS * (source + at) + i) for i, log in enumerate(self.log_popularity[at])]
            for at in range(number * TURN, (number + 1) * TURN)
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


@dataclass
class Measured:
    """Of one contender, by round."""

    wall: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    imbalance: list[float] = field(default_factory=list)
    moved: int = 0
    refused: int = 0


@process_settings()
def race(loads: Loads, logs: list[Tensor]) -> dict[str, Measured]:
    """What each contender took, in a round for each of `logs`."""
    names = list(loads.rivals or RIVALS)
    measured = {name: Measured() for name in names}
    for seed, log_popularity in enumerate(logs):
        # Contenders beside each other change places, too: rounds begin at different ones and go either way.
        order = [*names[seed % len(names) :], *names[: seed % len(names)]][:: 1 if seed % 2 else -1]
        runs = {name: Live(RIVALS[name], loads, log_popularity, seed) for name in order}
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in order}
        for number in range(TURNS):
            for name in order[number % len(order) :] + order[: number % len(order)]:
                times[name].append(runs[name].turn(number))
        for name, live in runs.items():
            wall, processor = np.sum(times[name], axis=0)
            mine = measured[name]
            mine.wall.append(float(wall))
            mine.processor.append(float(processor))
            mine.imbalance.append(float(np.mean(live.imbalances)))
            mine.moved += sum(migration.report.cost.experts for migration in live.experts.migrations)
            mine.refused += live.experts.replanner.plans_refused if live.experts.replanner else 0
    return measured


def table(measured: dict[str, Measured]) -> list[dict[str, Any]]:
    """A row for each contender."""
    stays, rows = measured[STAY], []
    for name, mine in measured.items():
        wall, processor = np.divide(stays.wall, mine.wall), np.divide(stays.processor, mine.processor)
        rows.append(
            {
                "contender": name,
                "imbalance": round(statistics.mean(mine.imbalance), 2),
                "ms a step": round(1e3 * statistics.median(mine.wall) / STEPS, 1),
                "x, wall": round(float(np.median(wall)), 3),
                "wall, of rounds": f"{wall.min():.2f} to {wall.max():.2f}",
                "x, busiest processor": round(float(np.median(processor)), 3),
                "processor, of rounds": f"{processor.min():.2f} to {processor.max():.2f}",
                "experts moved": mine.moved,
                "plans refused": mine.refused,
            }
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--loads", nargs="+", default=list(LOADS), choices=list(LOADS))
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    rows = []
    for name in options.loads:
        loads = LOADS[name]
        logs = [loads.log_popularity(seed) for seed in range(options.rounds)]
        for world in options.worlds:
            found = table(run_distributed(race, world, loads, logs, timeout_s=3000)[0])
            rows += [{"processes": world, "loads": name, **row} for row in found]
            facts = {"rounds": options.rounds, "steps_of_a_round": STEPS, "cores": os.cpu_count()}
            write_report("moving_experts", rows, **facts)  # what is done is kept
    return 0


if __name__ == "__main__":
    sys.exit(main())
