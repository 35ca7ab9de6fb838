"""Our expert parallelism beside that of transformers: the same model, the same weights, the same tokens, on gloo.

    python benchmarks/speed/ep_speed.py                 2 and 4 processes, about four minutes on two cores
    python benchmarks/speed/ep_speed.py --worlds 2 --rounds 3

A Qwen3-MoE of 3.7 million parameters with 16 experts, top 2, in float32; 2,048 tokens per step over all ranks; forward,
backward, clipping, AdamW. transformers as it is configured shards with FSDP2 and brings tokens by its own all-to-all;
ours replicates the dense part with DDP. Like beside like: its all-to-all and its kernel with the dense part under DDP,
which no configuration of it makes, so it is put together here by hand. A last one has our dispatch with their kernel,
to tell where the difference comes from. Before anything is timed the first losses have to agree. All contenders of a
world run in one launch, in rounds in which each has its turn; figures are medians over rounds of the ratio in the same
round.

A second table takes one layer apart, forward and backward: what dispatch and combine cost beyond the all-to-alls of the
same rows and counts, as a share of the whole layer; of the model's sizes, which are tiny, and of those of moe_layer.py,
for which the target stands. Its last column has only the time in which the first process's own thread computes: without
what its all-to-alls do, and without waiting, which is longer where processes come to an all-to-all at unequal times.

Writes benchmarks/results/ep_speed.json and ep_layer.json; exit code 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))


from benchmarks.report import write_report
from benchmarks.support.processes import run_distributed
from toolkit.experts.layer.dispatcher import AllToAllDispatcher
from toolkit.experts.parallel.groups import make_expert_groups
from toolkit.experts.placement.placement import contiguous
from toolkit.experts.sharding.call import slots_of_rows
from toolkit.integrations.accelerate.expert_parallel import ExpertParallel
from toolkit.integrations.transformers import causal_lm, experts_in_files, use_toolkit_kernel
from toolkit.integrations.transformers.kernel import experts_forward
from toolkit.run.process_settings import process_settings

DIM, HIDDEN, EXPERTS, TOP_K, LAYERS, VOCAB = 128, 128, 16, 2, 4, 1024
TOKENS, LENGTH = 2048, 128
SHAPES = [(DIM, HIDDEN), (256, 512)]
"""Of the layer that is taken apart: the model's, and that of moe_layer.py, for which the target stands."""
STEPS_PER_TURN = 3
LEAST_TIMES_STOCK, MOST_OF_LAYER = 1.1, 0.10
"""The targets: tokens per second, and the share of a layer."""

STOCK, BY_HAND, OURS = "transformers (FSDP2)", "transformers by hand (DDP)", "ours (DDP)"
PLAIN = "no expert parallelism (DDP)"

Step = Callable[[Tensor], Tensor]


def config(dim: int = DIM, hidden: int = HIDDEN, experts: int = EXPERTS, top_k: int = TOP_K) -> Any:
    from transformers import Qwen3MoeConfig

    sizes: dict[str, Any] = {"hidden_size": dim, "intermediate_size": hidden, "moe_intermediate_size": hidden}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32}
    mixture: dict[str, Any] = {"num_experts": experts, "num_experts_per_tok": top_k, "norm_topk_prob": True}
    return Qwen3MoeConfig(vocab_size=VOCAB, num_hidden_layers=LAYERS, use_cache=False, **sizes, **heads, **mixture)


def save_model(folder: Path, *sizes: int) -> int:
    """Save a model of the `config` of these sizes, and return how many parameters it has."""
    torch.manual_seed(0)
    model = causal_lm(config(*sizes))
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def know_ours() -> None:
    """Register our experts kernel with transformers, and print no progress of loading."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    use_toolkit_kernel()


def under_transformers(folder: Path) -> Step:
    from torch.nn.utils import clip_grads_with_norm_, get_total_norm
    from transformers.distributed import DistributedConfig

    world = dist.get_world_size()
    distributed = DistributedConfig(fsdp_size=world, ep_size=world, ep_implementation="all_to_all")
    model: Any = causal_lm(folder, distributed_config=distributed, experts_implementation="grouped_mm")
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(ids: Tensor) -> Tensor:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        by_mesh: dict[Any, list[Any]] = {}  # as transformers' Trainer does: one norm per mesh
        for parameter in model.parameters():
            by_mesh.setdefault(parameter.grad.device_mesh, []).append(parameter)
        norms = [get_total_norm([p.grad for p in each]).full_tensor() for each in by_mesh.values()]  # type: ignore[attr-defined]
        for each in by_mesh.values():
            clip_grads_with_norm_(each, 1.0, torch.stack(norms).norm())
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def transformers_by_hand(folder: Path) -> Step:
    """Returns a step with transformers' experts and all-to-all, and DDP for all other parameters."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.nn.parallel import DistributedDataParallel
    from torch.nn.utils import clip_grads_with_norm_, get_total_norm
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    world = dist.get_world_size()
    model: Any = causal_lm(folder, experts_implementation="grouped_mm")
    model.train()
    modules = [f"model.layers.{layer}.mlp.experts" for layer in range(model.config.num_hidden_layers)]
    names = [f"{module}.{matrix}" for module in modules for matrix in ("gate_up_proj", "down_proj")]
    plan = dict.fromkeys(names, "grouped_gemm") | dict.fromkeys(modules, "ep_dispatch_experts")
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("ep", "tp"))
    apply_expert_parallelism(model, mesh["ep"], mesh["tp"], plan, "all_to_all")
    parameters = dict(model.named_parameters())
    experts = [parameters[name] for name in names]
    rest = [parameter for name, parameter in parameters.items() if name not in names]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW([{"params": rest}, {"params": experts}], lr=1e-4)

    def step(ids: Tensor) -> Tensor:
        loss = wrapped(input_ids=ids, labels=ids).loss
        loss.backward()
        for parameter in experts:
            parameter.grad.div_(world)  # as DDP does
        norms = [get_total_norm([p.grad for p in each]) for each in (rest, experts)]
        norm = torch.stack([norms[0], norms[1].full_tensor()]).norm()  # type: ignore[attr-defined]
        for each in (rest, experts):
            clip_grads_with_norm_(each, 1.0, norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def under_ddp(folder: Path, experts_implementation: str) -> Step:
    """Returns a step with our expert parallelism and DDP for all other parameters."""
    with experts_in_files():
        accelerator, model, optimizer = unprepared(folder, experts_implementation)
    groups = make_expert_groups(dist.get_world_size())
    return stepper(accelerator, *ExpertParallel(accelerator, groups=groups).prepare(model, optimizer))


def plain_ddp(folder: Path) -> Step:
    """Returns a step with DDP for all parameters, and our kernel."""
    accelerator, model, optimizer = unprepared(folder, "toolkit")
    return stepper(accelerator, *accelerator.prepare(model, optimizer))


def unprepared(folder: Path, experts_implementation: str) -> tuple[Any, Any, Any]:
    """Returns an accelerator, the saved model and its optimizer."""
    from accelerate import Accelerator

    model: Any = causal_lm(folder, experts_implementation=experts_implementation)
    model.train()
    return Accelerator(cpu=True), model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def stepper(accelerator: Any, model: Any, optimizer: Any) -> Step:
    def step(ids: Tensor) -> Tensor:
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def timed(work: Callable[..., Any], inputs: Sequence[Any]) -> float:
    """Seconds until the last rank is done with all of them."""
    dist.barrier()
    start = time.perf_counter()
    for each in inputs:
        work(each)
    dist.barrier()
    return time.perf_counter() - start


CONTENDERS: dict[str, Callable[[Path], Step]] = {
    STOCK: under_transformers,
    BY_HAND: transformers_by_hand,
    OURS: lambda folder: under_ddp(folder, "toolkit"),
    PLAIN: plain_ddp,
    "ours, their kernel (DDP)": lambda folder: under_ddp(folder, "grouped_mm"),
}


@process_settings()
def race(folder: Path, rounds: int, names: Sequence[str] = tuple(CONTENDERS)) -> dict[str, list[float]]:
    """Seconds per turn of each contender, by round."""
    know_ours()
    contenders = {name: CONTENDERS[name](folder) for name in names}
    world, rank = dist.get_world_size(), dist.get_rank()
    draws = torch.Generator().manual_seed(rank)

    def batch() -> Tensor:
        return torch.randint(VOCAB, (TOKENS // world // LENGTH, LENGTH), generator=draws)

    batches = [batch() for _ in range(2)]  # the second loss is that of weights after a clipped step
    losses = torch.stack([torch.stack([step(each) for each in batches]) for step in contenders.values()])
    dist.all_reduce(losses)
    if not torch.allclose(losses, losses[0].expand_as(losses), rtol=1e-5):
        raise RuntimeError(f"the contenders do not compute the same: {losses.tolist()}")
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds + 1):
        batches = [batch() for _ in range(STEPS_PER_TURN)]
        for name, step in contenders.items():
            seconds[name].append(timed(step, batches))
    return {name: each[1:] for name, each in seconds.items()}


@process_settings()
def take_apart(dim: int, hidden: int, rounds: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds of a layer, of its dispatch and combine alone, and of their bare all-to-alls, by round; and those in
    which this thread computed, on the first process."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts, Qwen3MoeTopKRouter

    world, rank = dist.get_world_size(), dist.get_rank()
    groups = make_expert_groups(world)
    dispatcher = AllToAllDispatcher(contiguous(EXPERTS, world), groups)
    local = config(dim, hidden)
    local.num_experts = EXPERTS // world
    torch.manual_seed(0)
    experts, router = Qwen3MoeExperts(local), Qwen3MoeTopKRouter(config(dim, hidden))
    for parameter in (*experts.parameters(), *router.parameters()):
        nn.init.normal_(parameter, std=0.02)
    torch.manual_seed(rank)
    x = torch.randn(TOKENS // world, dim, requires_grad=True)
    upstream = torch.randn_like(x)
    with torch.no_grad():
        _, weights, ids = router(x)
        sizes = dispatcher.dispatch(x, ids, weights)[1].plan.sizes[0]
    sent, received = sizes.sent, sizes.received
    counts, counts_back = torch.zeros(EXPERTS, dtype=torch.int64), torch.zeros(EXPERTS, dtype=torch.int64)
    out, back = torch.randn(sum(sent), dim), torch.empty(sum(received), dim)

    def layer(_: int) -> None:
        _, weights, ids = router(x)
        rows, dispatched = dispatcher.dispatch(x, ids, weights)
        slots = slots_of_rows(dispatched.rows_per_slot, len(rows))
        dispatcher.combine(experts_forward(experts, rows, slots, rows.new_ones(len(rows), 1)), dispatched).backward(
            upstream
        )
        experts.zero_grad()
        router.zero_grad()

    def dispatch_and_combine(_: int) -> None:
        rows, dispatched = dispatcher.dispatch(x, ids, weights.detach().requires_grad_())
        dispatcher.combine(rows, dispatched).backward(upstream)

    def bare(_: int) -> None:
        dist.all_to_all_single(counts_back, counts, group=groups.ep_group)
        for _ in range(2):  # forward, backward
            dist.all_to_all_single(back, out, received, sent, group=groups.ep_group)
            dist.all_to_all_single(out, back, sent, received, group=groups.ep_group)

    parts = {"layer": layer, "dispatch and combine": dispatch_and_combine, "bare all-to-alls": bare}
    seconds: dict[str, list[float]] = {name: [] for name in parts}
    busy: dict[str, list[float]] = {name: [] for name in parts}
    for turn in range(rounds + 1):
        for name, part in parts.items():
            before = time.thread_time()
            taken = timed(part, range(STEPS_PER_TURN)) / STEPS_PER_TURN
            if turn:
                seconds[name].append(taken)
                busy[name].append((time.thread_time() - before) / STEPS_PER_TURN)
            x.grad = None
    return seconds, busy


def beyond(parts: dict[str, list[float]]) -> float:
    """What dispatch and combine take beyond their bare all-to-alls, as a share of the layer."""
    return statistics.median((b - c) / a for a, b, c in zip(*parts.values(), strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    speeds, layers = [], []
    missed = False
    with tempfile.TemporaryDirectory() as folder:
        parameters = save_model(Path(folder))
        for world in options.worlds:
            seconds = run_distributed(race, world, Path(folder), options.rounds, timeout_s=1200)[0]
            for name, each in seconds.items():
                ratios = [stock / mine for stock, mine in zip(seconds[STOCK], each, strict=True)]
                alike = [theirs / mine for theirs, mine in zip(seconds[BY_HAND], each, strict=True)]
                speed = STEPS_PER_TURN * TOKENS / statistics.median(each)
                low, _, high = statistics.quantiles(ratios, n=4)
                ratio = statistics.median(ratios)
                missed |= name == OURS and ratio < LEAST_TIMES_STOCK
                speeds.append(
                    {
                        "processes": world,
                        "contender": name,
                        "tokens/s": round(speed),
                        "x transformers": round(ratio, 3),
                        "quartiles": f"{low:.3f} to {high:.3f}",
                        "x transformers by hand": round(statistics.median(alike), 3),
                    }
                )
            for dim, hidden in SHAPES:
                parts, busy = run_distributed(take_apart, world, dim, hidden, options.rounds, timeout_s=600)[0]
                missed |= (dim, hidden) == SHAPES[-1] and beyond(parts) > MOST_OF_LAYER
                medians = {f"{name}, ms": round(1e3 * statistics.median(each), 2) for name, each in parts.items()}
                row = {"processes": world, "dim": dim, "hidden": hidden, **medians}
                shares = {"beyond, share": beyond(parts), "beyond, share of computing": beyond(busy)}
                layers.append(row | {name: round(share, 3) for name, share in shares.items()})
    facts = {"parameters": parameters, "tokens_per_step": TOKENS, "rounds": options.rounds}
    write_report("ep_speed", speeds, target=LEAST_TIMES_STOCK, **facts)
    write_report("ep_layer", layers, target=MOST_OF_LAYER, **facts)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
