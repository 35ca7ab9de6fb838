"""Training steps with moving experts, compared with static placement, on gloo.

    python benchmarks/speed/moving_experts.py                           every load on 2, 4 and 8 processes, an hour
    python benchmarks/speed/moving_experts.py --loads steep --worlds 2

The model has two blocks of a dense network and an MoE layer with 16 experts, top 2, in float32. A step is a forward and
a backward pass, clipping and fused AdamW. Router choices are drawn from Zipf's law with the hottest experts on the
first rank, or from the loads of a language model without balance loss (`recorded`, from `record_traces.py`; needs
$TOOLKIT_DATA_DIR). `drifting` loads follow a random walk in each step and layer. Planners run every 8 steps, and times
include migrations. All variants of a load get the same draws in one launch, in turns of 16 steps. Each round has new
models and draws. Rounds permute the order in which models are created and the order of turns, because memory locations
change ratios by up to 0.1 and the first model is the slowest. `control` does not move experts either: its distance from
1 is the error. `forced balance` draws as many tokens of each rank for each expert, the least time that any placement
can reach.

`eplb` is DeepSeek's published expert parallelism load balancer, which plans from the last window only. `oracle` is the
static optimal placement for the known loads. Ratios compare a variant with `blocks, never moved` over a round, by wall
time (meaningful if each rank has a core), by processor time of the busiest rank of a turn, and by processor time of the
busiest rank of each step. Shares divide the time of `forced balance` by the time of a variant, without the first turn,
in which the first plan is made. The table has medians and ranges over rounds.

`example` in the result has the loads and placements of one guarded run by turn, from which
`python benchmarks/speed/moving_experts_image.py` draws the README's animation.

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
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.placement.record_traces import language_model
from benchmarks.placement.simulator import Block, DrawnRouter, drawn, step
from benchmarks.report import write_report
from benchmarks.support.processes import run_distributed
from toolkit.experts.layer.moe_layer import make_moe, moe_layers
from toolkit.experts.moving.replan_options import ReplanOptions
from toolkit.experts.placement.loads import Load, rank_imbalance
from toolkit.experts.placement.placement import ExpertPlacement, contiguous
from toolkit.experts.placement.planners.simple import lpt, round_robin
from toolkit.experts.routing.traces import read_trace
from toolkit.integrations.accelerate.expert_parallel import ExpertParallel
from toolkit.run.process_settings import process_settings

EXPERTS, TOP_K, DIM, LAYERS, EVERY, TURN, TURNS = 16, 2, 256, 2, 8, 16, 3
STEPS = TURNS * TURN
"""Steps per round."""


@dataclass(frozen=True, kw_only=True)
class Loads:
    """Expert loads and model sizes."""

    skew: float = 0.0
    """Zipf exponent in the first step; 0 is uniform."""
    drift: float = 0.0
    """Standard deviation of the change of log popularity per step."""
    recorded: bool = False
    """Use the loads of a recorded run."""
    hidden: int = 512
    tokens: int = 1024
    """Tokens per step over all processes."""
    variants: tuple[str, ...] | None = None
    """Names of variants; None for all."""

    def log_popularity(self, seed: int) -> Tensor:
        """Return log popularity by step of a round, layer and expert."""
        if self.recorded:
            return _recorded(seed)
        begin = -self.skew * torch.arange(1.0, EXPERTS + 1).log()
        draws = torch.Generator().manual_seed(seed)
        return begin + self.drift * torch.randn(STEPS, LAYERS, EXPERTS, generator=draws).cumsum(0)


def _recorded(seed: int) -> Tensor:
    """Return the last log loads of a language model trained without balance loss."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.npz"
        language_model(path, seed, balance_weight=0.0, steps=100 + STEPS)
        load_TLE = torch.from_numpy(read_trace(path).load_TLSE()[-STEPS:].sum(2))
    return (load_TLE + 0.5).log()


STAY, CONTROL, FORCED = "blocks, never moved", "control", "forced balance"
GUARDED, SPARE = "swap", "swap, a spare slot"
FEWER = (STAY, FORCED, GUARDED, "eplb, no guard")
MORE = (*FEWER, CONTROL, "swap, no guard", SPARE, "replicate")
LOADS = {
    "steep, larger": Loads(skew=1.0, hidden=1024, tokens=2048, variants=MORE),
    "steep": Loads(skew=1.0, variants=FEWER),
    "balanced": Loads(variants=FEWER),
    "drifting": Loads(skew=0.5, drift=0.1, variants=FEWER),
    "mild": Loads(skew=0.5, variants=FEWER),
    "recorded": Loads(recorded=True, variants=FEWER),
}


def eplb(load_E: Load, current: ExpertPlacement) -> ExpertPlacement:
    """Return the placement of DeepSeek's balancer for one group of experts.

    Each spare slot goes to the expert with the largest load per replica. Then the heaviest replica goes first, to the
    least loaded rank with a free slot. Here, replicated experts are placed first, each replica on a different rank.
    """
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
class Variant:
    """Placement and rebalancing of a variant."""

    replan: ReplanOptions | None = None
    initial: str = "blocks"
    spare_slots: int = 0
    forced: bool = False
    """Draw equal numbers of tokens for all experts instead of the loads."""


def forced_ids(tokens: int, seed: int) -> Tensor:
    """Draw distinct experts for each token, int64 (T, K), with equal numbers of tokens for all experts."""
    uniform = torch.rand(tokens * TOP_K // EXPERTS, EXPERTS, generator=torch.Generator().manual_seed(seed))
    return uniform.argsort(-1).reshape(tokens, TOP_K)


def _moves(planner: Any, **options: Any) -> ReplanOptions:
    return ReplanOptions(planner=planner, every=EVERY, **options)


VARIANTS = {
    STAY: Variant(),
    CONTROL: Variant(),
    FORCED: Variant(forced=True),
    "round robin, never moved": Variant(initial="round robin"),
    GUARDED: Variant(replan=_moves("swap")),
    "swap, no guard": Variant(replan=_moves("swap", guarded=False)),
    SPARE: Variant(replan=_moves("swap"), spare_slots=1),
    "replicate": Variant(replan=_moves("replicate"), spare_slots=1),
    "eplb, no guard": Variant(replan=_moves(eplb, guarded=False)),
    "oracle": Variant(initial="oracle"),
}


class Times(NamedTuple):
    """Seconds of a turn."""

    wall: float
    turn: float
    """Processor time of the busiest rank of the turn."""
    step: float
    """Processor time of the busiest rank of each step, summed over steps."""


class Live:
    """Model and training loop of one variant."""

    def __init__(self, variant: Variant, loads: Loads, log_popularity: Tensor, seed: int):
        from accelerate import Accelerator

        self.accelerator = Accelerator(cpu=True)
        self.world = self.accelerator.num_processes
        torch.manual_seed(0)
        sizes = (DIM, loads.hidden, EXPERTS, TOP_K)
        model = nn.Sequential(*[Block(DIM, make_moe(*sizes, router_type=DrawnRouter)) for _ in range(LAYERS)])
        names = list(moe_layers(model))
        self.log_popularity, self.seed, self.forced = log_popularity, seed, variant.forced
        placements = [self._initial(variant, log) for log in log_popularity.mean(0)]
        self.experts = ExpertParallel(
            self.accelerator,
            ep_size=self.world,
            replan=variant.replan,
            spare_slots=variant.spare_slots,
            placement=lambda name, *_: placements[names.index(name)],
        )
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
        self.layers = list(moe_layers(model).values())
        self.model, self.optimizer = self.experts.prepare(model, optimizer)
        self.x = torch.randn(loads.tokens // self.world, DIM)
        self.imbalances: list[float] = []
        self.turns: list[dict[str, Any]] = []
        """By turn, in the first layer: tokens per expert at its end and the rank of each expert at its beginning."""

    def _initial(self, variant: Variant, log_popularity: Tensor) -> ExpertPlacement:
        blocks = contiguous(EXPERTS, self.world)
        load_E = drawn(log_popularity, 20_000, 0).flatten().bincount(minlength=EXPERTS).numpy()
        if variant.initial == "round robin":
            return round_robin(load_E, blocks)
        return lpt(load_E, blocks) if variant.initial == "oracle" else blocks

    def turn(self, number: int) -> Times:
        """Run the steps of a turn on all ranks."""
        source = STEPS * (self.seed * self.world + dist.get_rank())
        batches = [
            [
                forced_ids(len(self.x), draw) if self.forced else drawn(log, len(self.x), draw)
                for draw, log in enumerate(self.log_popularity[at], start=LAYERS * (source + at))
            ]
            for at in range(number * TURN, (number + 1) * TURN)
        ]
        placement = self.layers[0].expert_stack.placement
        ranks = [placement.owner(expert).rank for expert in range(EXPERTS)]
        dist.barrier()
        began, marks = time.perf_counter(), [time.process_time()]
        for ids in batches:
            for layer, ids_TK in zip(self.layers, ids, strict=True):
                layer.router.ids_TK = ids_TK
            step(self.accelerator, self.model, self.optimizer, self.x)
            marks.append(time.process_time())
        dist.barrier()
        seconds = time.perf_counter() - began
        steps = torch.tensor(marks, dtype=torch.float64).diff()
        turn = steps.sum()
        for own in (steps, turn):
            dist.all_reduce(own, op=dist.ReduceOp.MAX)
        loads = torch.stack([layer.expert_stack.log.last_load_E for layer in self.layers])
        dist.all_reduce(loads)
        placements = [layer.expert_stack.placement for layer in self.layers]
        self.imbalances += [rank_imbalance(load_E, placed) for load_E, placed in zip(loads, placements, strict=True)]
        self.turns.append({"load": loads[0].tolist(), "rank": ranks})
        return Times(seconds, float(turn), float(steps.sum()))


MEASURES = ("wall", "busiest in a turn", "busiest in each step")


@dataclass
class Measured:
    """Results of one variant by round."""

    times: list[Times] = field(default_factory=list)
    later: list[Times] = field(default_factory=list)
    """`times` without the first turn."""
    imbalance: list[float] = field(default_factory=list)
    moved: int = 0
    rejected: int = 0
    turns: list[dict[str, Any]] = field(default_factory=list)
    """Turns of the first round, see `Live.turns`."""


@process_settings()
def time_variants(loads: Loads, logs: list[Tensor]) -> dict[str, Measured]:
    """Return the results of each variant, with a round for each of `logs`."""
    names = list(loads.variants or VARIANTS)
    measured = {name: Measured() for name in names}
    for seed, log_popularity in enumerate(logs):
        # Rounds start at different variants and alternate the direction, so neighbours change.
        order = [*names[seed % len(names) :], *names[: seed % len(names)]][:: 1 if seed % 2 else -1]
        runs = {name: Live(VARIANTS[name], loads, log_popularity, seed) for name in order}
        times: dict[str, list[Times]] = {name: [] for name in order}
        for number in range(TURNS):
            for name in order[number % len(order) :] + order[: number % len(order)]:
                times[name].append(runs[name].turn(number))
        for name, live in runs.items():
            own = measured[name]
            for found, first in ((own.times, 0), (own.later, 1)):
                found.append(Times(*map(float, np.sum(times[name][first:], axis=0))))
            own.turns = own.turns or live.turns
            own.imbalance.append(float(np.mean(live.imbalances)))
            own.moved += sum(migration.report.cost.experts for migration in live.experts.migrations)
            own.rejected += live.experts.replanner.plans_refused if live.experts.replanner else 0
    return measured


def table(measured: dict[str, Measured]) -> list[dict[str, Any]]:
    """Return a row for each variant."""
    rows = []
    for name, own in measured.items():
        times = np.array(own.times)
        compared = {"x": np.array(measured[STAY].times) / times, "share": measured[FORCED].later / np.array(own.later)}
        ratios = {
            f"{what}, {measure}": ratio
            for what, found in compared.items()
            for measure, ratio in zip(MEASURES, found.T, strict=True)
        }
        rows.append(
            {
                "contender": name,
                "imbalance": round(statistics.mean(own.imbalance), 2),
                "ms a step": round(1e3 * float(np.median(times[:, 0])) / STEPS, 1),
                **{column: round(float(np.median(ratio)), 3) for column, ratio in ratios.items()},
                **{
                    f"range, {column}".replace("range, x,", "range,"): f"{ratio.min():.2f} to {ratio.max():.2f}"
                    for column, ratio in ratios.items()
                },
                "experts moved": own.moved,
                "plans refused": own.rejected,
            }
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--loads", nargs="+", default=list(LOADS), choices=list(LOADS))
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    example: list[dict[str, Any]] = []
    for name in options.loads:
        loads = LOADS[name]
        logs = [loads.log_popularity(seed) for seed in range(options.rounds)]
        for world in options.worlds:
            measured = run_distributed(time_variants, world, loads, logs, timeout_s=3000)[0]
            rows += [{"processes": world, "loads": name, **row} for row in table(measured)]
            example = example or (measured[GUARDED].turns if world == 2 else [])
            facts = {"rounds": options.rounds, "steps_of_a_round": STEPS, "cores": os.cpu_count(), "example": example}
            write_report("moving_experts", rows, **facts)  # after each world, for interrupted runs
    return 0


if __name__ == "__main__":
    sys.exit(main())
