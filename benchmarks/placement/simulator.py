"""Predicted and measured step times: `toolkit.lab.simulate` compared with live runs on gloo.

    python benchmarks/placement/simulator.py                      every configuration, ten minutes on two idle cores
    python benchmarks/placement/simulator.py --only 3 7 --rounds 3    two configurations

A configuration is a model with two blocks of a dense network and an MoE layer, trained with DDP, `ExpertParallel`,
clipping and AdamW. Router choices are drawn in advance, so loads are known. In interleaved rounds of one launch, the
script times components (experts at three sizes, routing, dispatch and combine, bare all-to-alls, the dense network, the
optimizer) and full steps. The rates of the `Machine` come only from the components, whose sizes are the same for all
configurations. The prediction uses these rates, the loads and the placement. Times are medians over rounds: the fastest
step is slower than the sum of the fastest components, which are from different rounds.

With more than two processes on two cores, each has less than one core: `cores` of the machine. Writes
benchmarks/results/simulator.json; exit code 1 if a prediction is off by more than 10 %.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.report import write_report
from benchmarks.support.processes import run_distributed
from toolkit.experts.layer.dispatcher import AllToAllDispatcher, LocalDispatcher, TokenDispatcher
from toolkit.experts.layer.grouped_experts import GroupedExperts
from toolkit.experts.layer.moe_layer import make_moe, moe_layers
from toolkit.experts.layer.router import TopKRouter
from toolkit.experts.parallel.groups import make_expert_groups
from toolkit.experts.parallel.sync import clip_gradients
from toolkit.experts.placement.cost_model import EXCHANGES, Cores
from toolkit.experts.placement.placement import ExpertPlacement, contiguous, with_spare_slots
from toolkit.experts.placement.planners import lpt, replicate
from toolkit.integrations.accelerate.expert_parallel import ExpertParallel
from toolkit.lab.simulate import Machine, simulate
from toolkit.run.process_settings import process_settings

LAYERS, TOP_K = 2, 2
BATCHES = 4
"""Batches per round, each with its own router choices."""
TOKENS_TIMED, ROWS_TIMED, SLOTS_TIMED = (128, 768), (256, 1536), (4, 24)
"""Sizes of the timed components per process."""
TARGET = 0.10
Work = Callable[[], Any]


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of a live run."""

    processes: int = 2
    experts: int = 16
    skew: float = 0.0
    """Zipf exponent of expert popularity; 0 is uniform."""
    placement: str = "blocks"
    tokens: int = 2048
    """Tokens of a step over all processes."""
    dim: int = 128
    hidden: int = 256


CONFIGS = [
    Config(processes=1),
    Config(processes=1, experts=64, tokens=1024),
    Config(processes=1, experts=8, skew=1.0, dim=256, hidden=512, tokens=1024),
    Config(),
    Config(skew=1.0),
    Config(skew=1.0, placement="balanced"),
    Config(skew=1.0, placement="replicas"),
    Config(experts=8, tokens=1024),
    Config(experts=64),
    Config(experts=64, skew=1.0, placement="balanced", tokens=4096),
    Config(dim=256, hidden=512),
    Config(dim=256, hidden=512, skew=1.0, tokens=1024),
    Config(processes=4),
    Config(processes=4, skew=1.0),
    Config(processes=4, skew=1.0, placement="replicas", tokens=4096),
    Config(processes=4, experts=64, dim=64, hidden=128, skew=1.0, placement="balanced"),
    Config(experts=32, skew=0.5),
    Config(skew=0.5, placement="replicas", tokens=4096),
    Config(processes=4, experts=32, skew=0.5, placement="balanced"),
    Config(processes=4, dim=256, hidden=512, skew=1.0, tokens=1024),
]


# --- the model ---------------------------------------------------------------------------------------------------


class DrawnRouter(TopKRouter):
    """Router with fixed choices `ids_TK` and the usual routing weights."""

    ids_TK: Tensor

    def choose(self, scores_TE: Tensor) -> Tensor:
        return self.ids_TK[: len(scores_TE)]


class Block(nn.Module):
    """A dense network and an optional MoE layer, each with a norm and a residual connection."""

    def __init__(self, dim: int, moe: nn.Module | None):
        super().__init__()
        self.dense = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.norm, self.moe = nn.LayerNorm(dim), moe

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dense(x)
        return x + (self.norm(x) if self.moe is None else self.moe(self.norm(x)))


def popularity(config: Config, layer: int) -> Tensor:
    """Return log popularities, in a different order for each layer."""
    ranks = torch.randperm(config.experts, generator=torch.Generator().manual_seed(layer)) + 1.0
    return -config.skew * ranks.log()


def drawn(log_popularity: Tensor, tokens: int, seed: int) -> Tensor:
    """Draw distinct experts for each token with the Gumbel top-k trick, int64 (T, K)."""
    uniform = torch.rand(tokens, len(log_popularity), generator=torch.Generator().manual_seed(seed))
    return (log_popularity - (-uniform.clamp(1e-9, 1 - 1e-7).log()).log()).topk(TOP_K).indices


def placements_of(config: Config) -> list[ExpertPlacement]:
    """Return a placement per layer, planned for the experts' popularity, not for the drawn loads."""
    found = []
    for layer in range(LAYERS):
        start = contiguous(config.experts, config.processes)
        load = popularity(config, layer).exp().numpy()
        if config.placement == "balanced":
            start = lpt(load, start)
        elif config.placement == "replicas":
            start = replicate(load, with_spare_slots(start, 1))
        found.append(start)
    return found


# --- timed components --------------------------------------------------------------------------------------------


class Live:
    """Full training steps of a user's loop."""

    def __init__(self, config: Config, accelerator: Any):
        world, rank = accelerator.num_processes, accelerator.process_index
        torch.manual_seed(0)
        sizes = (config.dim, config.hidden, config.experts, TOP_K)
        model = nn.Sequential(*[Block(config.dim, make_moe(*sizes, router_type=DrawnRouter)) for _ in range(LAYERS)])
        placements = placements_of(config)
        names = list(moe_layers(model))
        experts = ExpertParallel(
            accelerator,
            ep_size=world,
            spare_slots=placements[0].stride - config.experts // world,
            placement=lambda name, *_: placements[names.index(name)],
        )
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-6)
        self.layers = list(moe_layers(model).values())
        self.model, self.optimizer = experts.prepare(model, optimizer)
        self.accelerator = accelerator
        tokens = config.tokens // world
        self.x = torch.randn(tokens, config.dim)
        self.batches = [
            [drawn(popularity(config, i), tokens, 1000 * batch + 10 * rank + i) for i in range(LAYERS)]
            for batch in range(BATCHES)
        ]
        self.load_TLE = torch.stack(
            [torch.stack([ids.flatten().bincount(minlength=config.experts) for ids in each]) for each in self.batches]
        )

    def __call__(self) -> None:
        for ids in self.batches:
            for layer, ids_TK in zip(self.layers, ids, strict=True):
                layer.router.ids_TK = ids_TK
            step(self.accelerator, self.model, self.optimizer, self.x)


def step(accelerator: Any, model: nn.Module, optimizer: Any, x: Tensor) -> None:
    accelerator.backward(model(x).square().mean())
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def dense_steps(config: Config, accelerator: Any) -> dict[str, Work]:
    """Return the steps of the model without MoE layers."""
    model: Any = nn.Sequential(*[Block(config.dim, None) for _ in range(LAYERS)])
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-6))
    clip = torch.nn.utils.clip_grad_norm_

    def work(x: Tensor) -> None:
        accelerator.backward(model(x).square().mean())
        clip(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    inputs = [torch.randn(tokens, config.dim) for tokens in TOKENS_TIMED]
    return {f"dense {len(x)}": partial(work, x) for x in inputs}


def exchanges(config: Config, name: str, dispatcher: TokenDispatcher) -> dict[str, Work]:
    """Return forward and backward passes of routing, dispatch and combine with balanced loads."""
    router = DrawnRouter(config.dim, config.experts, TOP_K)

    def work(x: Tensor, ids_TK: Tensor) -> None:
        router.ids_TK = ids_TK
        routing = router(x)
        rows, dispatched = dispatcher.dispatch(x, routing.expert_ids_TK, routing.weights_TK)
        dispatcher.combine(rows, dispatched).square().mean().backward()
        router.zero_grad()

    found: dict[str, Work] = {}
    for tokens in TOKENS_TIMED:
        x = torch.randn(tokens, config.dim, requires_grad=True)
        ids = drawn(torch.zeros(config.experts), tokens, tokens)
        found[f"{name} {tokens}"] = partial(work, x, ids)
    return found


def bare_exchanges(config: Config, world: int) -> dict[str, Work]:
    """Return all-to-alls with the same number of bytes to each peer."""
    found: dict[str, Work] = {}
    for tokens in TOKENS_TIMED:
        rows = torch.randn(tokens * TOP_K // world * world, config.dim)
        back = torch.empty_like(rows)
        found[f"all-to-all {tokens}"] = partial(dist.all_to_all_single, back, rows)
    return found


def expert_products(config: Config) -> dict[str, Work]:
    """Return forward and backward passes of the experts, with the model's number of layers so that caches are cold."""
    found: dict[str, Work] = {}
    for rows, slots in expert_sizes():
        layers = [GroupedExperts(config.dim, config.hidden, expert_ids=range(slots)) for _ in range(LAYERS)]
        x = torch.randn(rows, config.dim, requires_grad=True)
        counts = torch.full((slots,), rows // slots)

        def work(layers: list[GroupedExperts] = layers, x: Tensor = x, counts: Tensor = counts) -> None:
            for layer in layers:
                layer(x, counts).backward(x.detach())
            for layer in layers:
                layer.zero_grad()

        found[f"experts {rows} {slots}"] = work
    return found


def expert_sizes() -> list[tuple[int, int]]:
    return [(ROWS_TIMED[0], SLOTS_TIMED[0]), (ROWS_TIMED[1], SLOTS_TIMED[0]), (ROWS_TIMED[0], SLOTS_TIMED[1])]


def optimizer_steps(config: Config) -> dict[str, Work]:
    found: dict[str, Work] = {}
    for slots in SLOTS_TIMED:
        layers = [GroupedExperts(config.dim, config.hidden, expert_ids=range(slots)) for _ in range(LAYERS)]
        parameters = [p for layer in layers for p in layer.parameters()]
        optimizer = torch.optim.AdamW(parameters, lr=1e-6)

        def work(parameters: list[nn.Parameter] = parameters, optimizer: Any = optimizer) -> None:
            for p in parameters:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            clip_gradients(parameters, 1.0)
            optimizer.step()

        found[f"optimizer {slots}"] = work
    return found


@process_settings()
def measure(config: Config, rounds: int) -> tuple[dict[str, list[float]], np.ndarray]:
    """Return seconds of each component and of a step by round, over all processes; and the loads of this process."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    world, rank = accelerator.num_processes, accelerator.process_index
    live = Live(config, accelerator)
    components = {
        **dense_steps(config, accelerator),
        **exchanges(config, "local", LocalDispatcher(contiguous(config.experts, 1))),
        **expert_products(config),
        **optimizer_steps(config),
    }
    if world > 1:
        dispatcher = AllToAllDispatcher(contiguous(config.experts, world), make_expert_groups(world))
        components |= exchanges(config, "sharded", dispatcher) | bare_exchanges(config, world)
    one_rank = f"experts {ROWS_TIMED[1]} {SLOTS_TIMED[0]}"
    seconds: dict[str, list[float]] = {name: [] for name in (*components, "experts of one rank", "step")}
    for _ in range(rounds + 1):
        for name, work in components.items():
            seconds[name].append(timed(work, world))
        seconds["experts of one rank"].append(timed(components[one_rank] if rank == 0 else lambda: None, world))
        seconds["step"].append(timed(live, world, repeats=1) / BATCHES)
    return {name: each[1:] for name, each in seconds.items()}, live.load_TLE.numpy()


def timed(work: Work, world: int, repeats: int = 4) -> float:
    if world > 1:
        dist.barrier()
    began = time.perf_counter()
    for _ in range(repeats):
        work()
    if world > 1:
        dist.barrier()
    return (time.perf_counter() - began) / repeats


# --- rates and predictions ---------------------------------------------------------------------------------------


def line(seconds: dict[str, float], name: str, sizes: tuple[int, int]) -> tuple[float, float]:
    """Fit fixed seconds and seconds per unit to two sizes."""
    low, high = (seconds[f"{name} {size}"] for size in sizes)
    each = max(0.0, (high - low) / (sizes[1] - sizes[0]))
    return max(0.0, low - each * sizes[0]), each


def machine_of(config: Config, seconds: dict[str, float]) -> Machine:
    """Return the rates of a process with its own core, from the component times."""
    count = os.cpu_count() or 1
    busy = (
        seconds[f"experts {ROWS_TIMED[1]} {SLOTS_TIMED[0]}"] / seconds["experts of one rank"]
        if config.processes > 1
        else 1.0
    )
    cores = Cores(count=count, busy_slowdown=max(1.0, busy / max(1.0, config.processes / count)))
    share = float(cores.slowdown(np.array(config.processes)))
    (small, more_rows, more_slots) = (seconds[f"experts {rows} {slots}"] / LAYERS for rows, slots in expert_sizes())
    per_row = (more_rows - small) / (ROWS_TIMED[1] - ROWS_TIMED[0])
    per_slot = (more_slots - small) / (SLOTS_TIMED[1] - SLOTS_TIMED[0])
    fixed = small - per_row * ROWS_TIMED[0] - per_slot * SLOTS_TIMED[0]
    local_fixed, local_token = line(seconds, "local", TOKENS_TIMED)
    optimizer_per_slot = line(seconds, "optimizer", SLOTS_TIMED)[1] / LAYERS
    dense_fixed, dense_token = line(seconds, "dense", TOKENS_TIMED)
    latency = per_byte = 0.0
    if config.processes > 1:
        latency, per_token = line(seconds, "all-to-all", TOKENS_TIMED)
        leaving = TOP_K * 4 * config.dim * (config.processes - 1) / config.processes
        per_byte = per_token / leaving
        sharded_fixed, sharded_token = line(seconds, "sharded", TOKENS_TIMED)
        per_row += max(0.0, sharded_token - local_token - 4 * per_token) / TOP_K
        local_fixed = max(local_fixed, sharded_fixed - EXCHANGES * latency)
    return Machine(
        seconds_per_row=per_row / share,
        seconds_per_slot=per_slot / share,
        seconds_per_layer=(fixed + local_fixed) / share,
        seconds_per_row_sent=local_token / TOP_K / share,
        bytes_per_second=share / per_byte if per_byte else 1e12,
        exchange_seconds=latency,
        cores=cores,
        top_k=TOP_K,
        dense_seconds=dense_fixed / share,
        dense_seconds_per_token=dense_token / share,
        optimizer_seconds_per_slot=optimizer_per_slot / share,
    )


def predicted(config: Config, machine: Machine, load_TLSE: np.ndarray) -> dict[str, float]:
    """Return mean seconds of a step and its parts."""
    weights = 4 * 2 * config.dim * config.hidden
    cost = machine.cost_model(row_bytes=2 * 4 * config.dim, weight_bytes=weights, optimizer_bytes=2 * weights)
    found = simulate(load_TLSE, placements_of(config), [cost] * LAYERS, machine)
    parts = {name: float(part.mean()) for name, part in vars(found).items()}
    return {"step": float(found.total.mean()), **parts}


def row_of(config: Config, rounds: int) -> dict[str, Any]:
    results = run_distributed(measure, config.processes, config, rounds, timeout_s=300)
    seconds = results[0][0]
    load_TLSE = np.stack([load for _, load in results], axis=2)
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    parts = predicted(config, machine_of(config, medians), load_TLSE)
    step = parts.pop("step")
    return {
        "processes": config.processes,
        "experts": config.experts,
        "skew": config.skew,
        "placement": config.placement,
        "tokens": config.tokens,
        "dim": config.dim,
        "measured ms": round(1e3 * medians["step"], 2),
        "predicted ms": round(1e3 * step, 2),
        "error %": round(100 * (step / medians["step"] - 1), 1),
        **{f"{name} %": round(100 * part / step) for name, part in parts.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, nargs="+", help="numbers of configurations; writes nothing")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    rows = []
    for number in options.only or range(len(CONFIGS)):
        rows.append({"number": number, **row_of(CONFIGS[number], options.rounds)})
        print(rows[-1], file=sys.stderr, flush=True)
    errors = [abs(row["error %"]) for row in rows]
    if not options.only:
        facts = {"largest error %": max(errors), "median error %": round(statistics.median(errors), 1)}
        write_report("simulator", rows, target=100 * TARGET, rounds=options.rounds, **facts)
    return int(max(errors) > 100 * TARGET)


if __name__ == "__main__":
    sys.exit(main())
