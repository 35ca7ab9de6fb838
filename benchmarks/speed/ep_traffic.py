"""Collectives of expert parallelism with replicas and with FSDP2 shards, counted and by a formula.

    python benchmarks/speed/ep_traffic.py            2, 4 and 8 processes, and the table of clusters
    python benchmarks/speed/ep_traffic.py --plan     only the table of clusters

`ep_size` ranks hold all experts once. Other ranks with the same experts hold replicas (DDP) or shards (FSDP2). The
baseline is transformers' expert parallelism with FSDP2 over all ranks. The model of ep_speed.py trains in float32 on
gloo; every set of top-k experts occurs equally often. A dispatch mode counts the collectives of a step on each rank,
also of DDP and FSDP2. Bytes and messages are of ring algorithms: an all-gather or reduce-scatter over n ranks sends
(n-1)/n of the whole tensor in n-1 messages, an all-reduce twice as much. An all-to-all sends directly. The formula has
to equal the counts of every rank by kind and group.

Step times are ratios to DDP in the same round, with the same `ep_size` or the smallest (transformers): median and
quartiles over interleaved rounds. `in before_clip` is the share of a step in `ExpertSync.before_clip`, the average over
ranks. `experts, MB` are weights, gradients and optimizer states.

The table of clusters applies the formula to bf16 and nodes of 8 GPUs, with rings and EP groups of neighbours, flat
all-to-all, uniform routing, no activation checkpointing and one micro-batch per step. GB are sent per GPU and step, the
average over GPUs. Below the break-even number of tokens per GPU, fewer bytes cross nodes than with EP groups of a node.

Writes benchmarks/results/ep_traffic.json (`collectives`: processes, variant, ep_size, kind, ranks and stride of the
group, calls, bytes) and ep_traffic_plan.json; exit code 1 if formula and counts differ.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.report import write_report
from benchmarks.speed import ep_speed
from benchmarks.support.accelerators import make_accelerator
from benchmarks.support.processes import run_distributed
from toolkit.experts.parallel.gradient_average import BUCKET_BYTES
from toolkit.experts.parallel.ownership import local_rows
from toolkit.experts.parallel.sync import ExpertSync
from toolkit.integrations.accelerate.expert_parallel import ExpertParallel
from toolkit.integrations.transformers import causal_lm
from toolkit.run.process_settings import process_settings

DDP, FSDP2, STOCK = "replicas (DDP)", "shards (FSDP2)", "transformers (FSDP2)"
EP_SIZES = {2: [2], 4: [2], 8: [2, 4]}  # by world size
SETS = torch.tensor(list(itertools.combinations(range(ep_speed.EXPERTS), ep_speed.TOP_K)))
SHAPE = (2, len(SETS))  # sequences and tokens of a rank
WARMUP, STEPS_PER_TURN = 9, 2
OPERATORS = {
    "c10d::alltoall_base_": ("all-to-all", 1),
    "c10d::_allgather_base_": ("all-gather", 0),
    "c10d::_reduce_scatter_base_": ("reduce-scatter", 1),
    "c10d::allreduce_": ("all-reduce", 0),
    "c10d::broadcast_": ("broadcast", 0),
    "_c10d_functional::all_to_all_single": ("all-to-all", 0),
    "_c10d_functional::all_reduce": ("all-reduce", 0),
}
"""Kind of each collective of torch, and index of the argument that is the whole tensor."""
LOCAL = ("_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd")
Key = tuple[str, int, int]  # kind, ranks of the group, distance between neighbours


class Traffic:
    """Collectives of one rank and step, and the bytes that it sends."""

    def __init__(self) -> None:
        self.calls: Counter[Key] = Counter()
        self.sent: defaultdict[Key, float] = defaultdict(float)

    def add(self, kind: str, size: int, stride: int, whole: float, calls: int = 1) -> None:
        """Add `calls` collectives of together `whole` bytes, in an all-to-all without this rank's."""
        if size > 1:
            times = (size - 1) / size * (1 + kind.startswith("all-reduce"))
            self.calls[kind, size, stride] += calls
            self.sent[kind, size, stride] += whole if kind.startswith("all-to-all") else whole * times

    def megabytes(self, kind: str = "") -> float:
        return round(sum(sent for key, sent in self.sent.items() if key[0].startswith(kind)) / 1e6, 3)

    def equals(self, other: Traffic) -> bool:
        return self.calls == other.calls and all(math.isclose(self.sent[key], other.sent[key]) for key in self.calls)

    def between_nodes(self, gpus: int) -> float:
        """Return the bytes sent to other nodes of `gpus` ranks, as an average over ranks."""
        total = 0.0
        for (kind, size, stride), sent in self.sent.items():
            nodes = [rank // gpus for rank in range(0, size * stride, stride)]
            if kind.startswith("all-to-all"):
                total += sent * sum(node > 0 for node in nodes) / (size - 1)
            else:
                total += sent * sum(a != b for a, b in itertools.pairwise([*nodes, nodes[0]])) / size
        return total


class Counted(TorchDispatchMode):
    """Counts the collectives of this rank."""

    def __init__(self, traffic: Traffic):
        super().__init__()
        self.traffic = traffic

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:  # its collectives come after it is unwrapped
            return NotImplemented
        name = func._schema.name
        if "c10d" in name and name not in LOCAL:
            kind, place = OPERATORS[name]
            group: Any = next((dist.ProcessGroup.unbox(a) for a in args if isinstance(a, torch.ScriptObject)), None)
            splits = args[4:] if group else args[2:]
            group = group or dist.distributed_c10d._resolve_process_group(args[-1])
            ranks, tensors = dist.get_process_group_ranks(group), args[place]
            tensors = tensors if isinstance(tensors, list) else [tensors]
            whole = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            if kind == "all-to-all":
                whole *= 1 - (splits[0][group.rank()] / sum(splits[0]) if splits[0] else 1 / len(ranks))
                kind += " of counts" if tensors[0].dtype == torch.int64 else ""
            elif kind == "all-reduce" and whole <= 8:
                kind += " of norms"
            self.traffic.add(kind, len(ranks), ranks[-1] - ranks[-2] if len(ranks) > 1 else 1, whole)
        return func(*args, **(kwargs or {}))


class Model(NamedTuple):
    """Sizes of a language model; `rest` are non-expert parameters."""

    dim: int
    hidden: int
    experts: int
    top_k: int
    layers: int
    vocabulary: int
    rest: int = 0

    @property
    def of_experts(self) -> int:
        return self.layers * self.experts * 3 * self.dim * self.hidden


SMALL = Model(ep_speed.DIM, ep_speed.HIDDEN, ep_speed.EXPERTS, ep_speed.TOP_K, ep_speed.LAYERS, ep_speed.VOCAB)
CLUSTERS = {
    "Qwen3-30B-A3B": Model(2048, 768, 128, 8, 48, 151_936, rest=1_541_093_376),
    "Mixtral 8x7B": Model(4096, 14_336, 8, 2, 32, 32_000, rest=1_605_636_096),
}
LAYOUTS = [(8, 1), (8, 8), (64, 1), (64, 8), (64, 64), (256, 8), (256, 128), (1024, 8), (1024, 128)]
NODE, TOKENS = 8, (4096, 16_384)  # GPUs of a node, tokens of a GPU


def formula(model: Model, world: int, ep_size: int, tokens: int, name: str, size: int = 4) -> Traffic:
    """Return the traffic of a rank and step with uniform routing and values of `size` bytes."""
    found, layers, copies = Traffic(), model.layers, world // ep_size
    sets_elsewhere = math.comb(model.experts - model.experts // ep_size, model.top_k)
    rows = tokens * (ep_size - 1) * (1 - sets_elsewhere / math.comb(model.experts, model.top_k))
    # Dispatch sends activations, weights and int32 slots, its backward pass no slots, and combine only activations.
    row = 4 * model.dim * size + 2 * model.top_k * size + model.top_k * 4
    found.add("all-to-all", ep_size, 1, layers * rows * row, 4 * layers)
    found.add("all-to-all of counts", ep_size, 1, layers * 16 * (ep_size - 1), layers)
    found.add("all-reduce of norms", ep_size, 1, 4)
    rest, experts = model.rest * size, model.of_experts // ep_size * size
    if name == FSDP2:
        tail = (model.vocabulary + 1) * model.dim * size  # final norm and head: one unit, gathered once
        found.add("all-gather", world, 1, 2 * rest - tail, 2 * layers + 3)
        found.add("all-gather", copies, ep_size, 2 * experts, 2 * layers)
        for ranks, stride, whole, units in ((world, 1, rest, layers + 2), (copies, ep_size, experts, layers)):
            found.add("reduce-scatter", ranks, stride, whole, units)
            found.add("all-reduce of norms", ranks, stride, 4)
    else:
        found.add("all-reduce", world, 1, rest, 1 + math.ceil((rest - 2**20) / (25 * 2**20)))  # DDP's buckets
        # Two matrices of a layer in buckets, and whether each has a gradient.
        most = max(1, int(BUCKET_BYTES // (experts / layers)))
        found.add("all-reduce", copies, ep_size, experts + 4 * 2 * layers, math.ceil(layers / most) + 1)
        found.add("broadcast", world, 1, 128)  # buffers
    return found


def route_uniformly(module: nn.Module, _: Any, outputs: Any) -> Any:
    """Replace the choices of a router by every set of experts, equally often."""
    if type(module).__name__ != "Qwen3MoeTopKRouter":
        return None
    logits, ids = outputs[0], SETS.repeat(len(outputs[0]) // len(SETS), 1)
    scores = logits.softmax(-1).gather(1, ids)
    return logits, scores / scores.sum(1, keepdim=True), ids


def make_step(folder: Path, name: str, ep_size: int) -> ep_speed.Step:
    """Return the training step of a variant."""
    if name == STOCK:
        return ep_speed.under_transformers(folder)
    accelerator: Any = make_accelerator("fsdp2" if name == FSDP2 else "ddp", cpu=True)
    model = causal_lm(folder, experts_implementation="toolkit").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    accelerator.experts = ExpertParallel(accelerator, ep_size=ep_size)
    return ep_speed.stepper(accelerator, *accelerator.experts.prepare(model, optimizer))


@dataclass
class Measured:
    """Traffic, bytes of experts, seconds of each turn and their share in `before_clip`, on one rank."""

    name: str
    ep_size: int
    traffic: Traffic = field(default_factory=Traffic)
    bytes: int = 0
    seconds: list[float] = field(default_factory=list)
    averaging: list[float] = field(default_factory=list)

    def weigh(self, optimizer: Any, *_: Any) -> None:
        experts = [p for group in optimizer.param_groups for p in group["params"] if p.ndim == 3]
        tensors = [local_rows(t) for p in experts for t in (p, p.grad, *optimizer.state[p].values())]
        self.bytes = sum(t.numel() * t.element_size() for t in tensors if t.numel() > 1)


@process_settings()
def measure(folder: Path, ep_sizes: list[int], rounds: int) -> list[Measured]:
    """Count and time all variants."""
    ep_speed.use_kernel()
    nn.modules.module.register_module_forward_hook(route_uniformly)
    results = [Measured(name, ep_size) for ep_size in ep_sizes for name in (DDP, FSDP2)]
    results.append(Measured(STOCK, dist.get_world_size()))
    variants = [make_step(folder, each.name, each.ep_size) for each in results]
    draws = torch.Generator().manual_seed(dist.get_rank())
    before_clip, spent = ExpertSync.before_clip, 0.0

    def timed_before_clip(sync: ExpertSync) -> None:
        nonlocal spent
        spent -= time.perf_counter()
        before_clip(sync)
        spent += time.perf_counter()

    def batches(count: int) -> list[Tensor]:
        return [torch.randint(ep_speed.VOCAB, SHAPE, generator=draws) for _ in range(count)]

    for ids in batches(WARMUP):
        losses = torch.stack([step(ids) for step in variants])
        dist.all_reduce(losses)
        if not torch.allclose(losses, losses[0].expand_as(losses), rtol=1e-4):
            raise RuntimeError(f"losses of the variants differ: {losses.tolist()}")
    for result, step in zip(results, variants, strict=True):
        hook = register_optimizer_step_post_hook(result.weigh)
        with Counted(result.traffic):
            step(*batches(1))
        hook.remove()
    with mock.patch.object(ExpertSync, "before_clip", timed_before_clip):
        for _ in range(rounds):
            inputs = batches(STEPS_PER_TURN)
            for result, step in zip(results, variants, strict=True):
                spent = 0.0
                seconds = ep_speed.timed(step, inputs)
                result.seconds.append(seconds)
                result.averaging.append(spent / seconds)
    return results


def row(ranks: Sequence[Measured], baseline: Measured, model: Model) -> dict[str, Any]:
    """Return the row of a variant, which all ranks measured."""
    first, world = ranks[0], len(ranks)
    expected = formula(model, world, first.ep_size, math.prod(SHAPE), first.name)
    ratios = [own / other for own, other in zip(first.seconds, baseline.seconds, strict=True)]
    shares = [statistics.mean(turn) for turn in zip(*(each.averaging for each in ranks), strict=True)]
    found: dict[str, Any] = {"processes": world, "ep_size": first.ep_size, "variant": first.name}
    for kind in ("all-to-all", "all-gather", "reduce-scatter", "all-reduce"):
        found[f"{kind}, MB"] = first.traffic.megabytes(kind)
    messages = (n * (key[1] - 1) * (1 + key[0].startswith("all-reduce")) for key, n in first.traffic.calls.items())
    found |= {"sent, MB": first.traffic.megabytes(), "messages": sum(messages)}
    found["equal"] = all(each.traffic.equals(expected) for each in ranks) if first.name != STOCK else None
    most = max(each.bytes for each in ranks)
    found |= {"experts, MB": round(most / 1e6, 3), "share of all experts": round(most / (16 * model.of_experts), 4)}
    for name, values in (("step, x DDP", ratios), ("in before_clip", shares)):
        low, middle, high = statistics.quantiles(values, n=4)
        found |= {name: round(middle, 3), f"{name}, quartiles": f"{low:.3f} to {high:.3f}"}
    return found


def plan(name: str, gpus: int, ep_size: int) -> dict[str, Any]:
    """Return the row of a cluster."""
    found: dict[str, Any] = {"model": name, "GPUs": gpus, "ep_size": ep_size, "shards": gpus // ep_size}

    def gigabytes(ep_size: int, tokens: int) -> tuple[float, float]:
        traffic = formula(CLUSTERS[name], gpus, ep_size, tokens, FSDP2, size=2)
        between = traffic.between_nodes(NODE) / 1e9
        return sum(traffic.sent.values()) / 1e9 - between, between

    for tokens in TOKENS:
        found[f"inside, {tokens}"], found[f"between, {tokens}"] = (round(x, 1) for x in gigabytes(ep_size, tokens))
    fixed, of_million, one_node = (gigabytes(*each)[1] for each in ((ep_size, 0), (ep_size, 10**6), (NODE, 0)))
    found["break-even"] = round(1e6 * (one_node - fixed) / (of_million - fixed)) if ep_size > NODE else None
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", action="store_true", help="only the table of clusters")
    parser.add_argument("--worlds", type=int, nargs="+", default=[*EP_SIZES], choices=EP_SIZES, help="processes")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    plans = [plan(name, *each) for name in CLUSTERS for each in LAYOUTS if each[1] <= CLUSTERS[name].experts]
    write_report("ep_traffic_plan", plans, node=NODE)
    if options.plan:
        return 0
    rows, collectives = [], []
    with tempfile.TemporaryDirectory() as folder:
        model = SMALL._replace(rest=ep_speed.save_model(Path(folder)) - SMALL.of_experts)
        for world in options.worlds:
            ranks = run_distributed(measure, world, Path(folder), EP_SIZES[world], options.rounds, timeout_s=1800)
            for variant in zip(*ranks, strict=True):
                name, ep_size = variant[0].name, variant[0].ep_size
                baseline = next(v for v in ranks[0] if v.name == DDP and (v.ep_size == ep_size or name == STOCK))
                rows.append(row(variant, baseline, model))
                for key, sent in variant[0].traffic.sent.items():
                    collectives.append([world, name, ep_size, *key, variant[0].traffic.calls[key], round(sent)])
    write_report("ep_traffic", rows, rounds=options.rounds, tokens=math.prod(SHAPE), collectives=collectives)
    return int(any(each["equal"] is False for each in rows))


if __name__ == "__main__":
    sys.exit(main())
