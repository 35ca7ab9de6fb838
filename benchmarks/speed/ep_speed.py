"""Expert parallelism of the toolkit compared with transformers: same model, weights and tokens, on gloo.

    python benchmarks/speed/ep_speed.py                 2 and 4 processes, about four minutes on two cores
    python benchmarks/speed/ep_speed.py --worlds 2 --rounds 3

A Qwen3-MoE with 3.7 million parameters and 16 experts, top 2, in float32; 2,048 tokens per step over all ranks;
forward pass, backward pass, clipping, AdamW. transformers' configuration shards non-expert parameters with FSDP2; the
toolkit replicates them with DDP. "by hand" combines transformers' all-to-all and kernel with DDP, which has no
configuration. Further variants are the toolkit's dispatch with transformers' kernel, and plain DDP. The losses of the
first steps are compared before timing. Variants run in interleaved rounds of one launch; values are medians over
rounds of the ratio in the same round.

A second table splits the forward and backward pass of one layer: the cost of dispatch and combine beyond bare
all-to-alls of the same rows and counts, as a share of the layer. Its sizes are the model's and the sizes of
moe_layer.py, for which the target holds. The last column counts only the thread time of the first process, without
all-to-alls and waiting.

Writes benchmarks/results/ep_speed.json and ep_layer.json; exit code 1 if a target is missed.
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
from toolkit.integrations.accelerate.expert_parallel import ExpertParallel
from toolkit.integrations.transformers import causal_lm, experts_in_files, use_toolkit_kernel
from toolkit.integrations.transformers.kernel import feed_forward
from toolkit.run.process_settings import process_settings

DIM, HIDDEN, EXPERTS, TOP_K, LAYERS, VOCAB = 128, 128, 16, 2, 4, 1024
TOKENS, LENGTH = 2048, 128
SHAPES = [(DIM, HIDDEN), (256, 512)]
"""Sizes of the layer in the second table: the model's, and of moe_layer.py with the target."""
STEPS_PER_TURN = 3
LEAST_TIMES_STOCK, MOST_OF_LAYER = 1.1, 0.10
"""Targets: relative tokens per second, and share of a layer."""

STOCK, BY_HAND, OURS = "transformers (FSDP2)", "transformers by hand (DDP)", "ours (DDP)"
PLAIN = "no expert parallelism (DDP)"

Step = Callable[[Tensor], Tensor]


def config(dim: int = DIM, hidden: int = HIDDEN, experts: int = EXPERTS, top_k: int = TOP_K) -> Any:
    from transformers import Qwen3MoeConfig

    sizes: dict[str, Any] = {"hidden_size": dim, "intermediate_size": hidden, "moe_intermediate_size": hidden}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32, "num_hidden_layers": LAYERS}
    sizes |= {"num_experts": experts, "num_experts_per_tok": top_k, "norm_topk_prob": True}
    return Qwen3MoeConfig(vocab_size=VOCAB, use_cache=False, **sizes)


def save_model(folder: Path, *sizes: int) -> int:
    """Save a model with these sizes of `config`, and return its number of parameters."""
    torch.manual_seed(0)
    model = causal_lm(config(*sizes))
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def use_kernel() -> None:
    """Register the toolkit's experts kernel with transformers, and hide loading progress."""
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
    """Return a step with the toolkit's expert parallelism and DDP for non-expert parameters."""
    with experts_in_files():
        accelerator, model, optimizer = unprepared(folder, experts_implementation)
    groups = make_expert_groups(dist.get_world_size())
    return stepper(accelerator, *ExpertParallel(accelerator, groups=groups).prepare(model, optimizer))


def plain_ddp(folder: Path) -> Step:
    """Return a step with DDP for all parameters and the toolkit's kernel."""
    accelerator, model, optimizer = unprepared(folder, "toolkit")
    return stepper(accelerator, *accelerator.prepare(model, optimizer))


def unprepared(folder: Path, experts_implementation: str) -> tuple[Any, Any, Any]:
    """Return an accelerator, the saved model and its optimizer."""
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
    """Return the seconds until all ranks have processed all inputs."""
    dist.barrier()
    start = time.perf_counter()
    for each in inputs:
        work(each)
    dist.barrier()
    return time.perf_counter() - start


VARIANTS: dict[str, Callable[[Path], Step]] = {
    STOCK: under_transformers,
    BY_HAND: transformers_by_hand,
    OURS: lambda folder: under_ddp(folder, "toolkit"),
    PLAIN: plain_ddp,
    "ours, their kernel (DDP)": lambda folder: under_ddp(folder, "grouped_mm"),
}


@process_settings()
def time_variants(folder: Path, rounds: int, names: Sequence[str] = tuple(VARIANTS)) -> dict[str, list[float]]:
    """Return seconds per turn of each variant, by round."""
    use_kernel()
    variants = {name: VARIANTS[name](folder) for name in names}
    world, rank = dist.get_world_size(), dist.get_rank()
    draws = torch.Generator().manual_seed(rank)

    def batch() -> Tensor:
        return torch.randint(VOCAB, (TOKENS // world // LENGTH, LENGTH), generator=draws)

    batches = [batch() for _ in range(2)]  # the second loss includes a clipped step
    losses = torch.stack([torch.stack([step(each) for each in batches]) for step in variants.values()])
    dist.all_reduce(losses)
    if not torch.allclose(losses, losses[0].expand_as(losses), rtol=1e-5):
        raise RuntimeError(f"losses of the variants differ: {losses.tolist()}")
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds + 1):
        batches = [batch() for _ in range(STEPS_PER_TURN)]
        for name, step in variants.items():
            seconds[name].append(timed(step, batches))
    return {name: each[1:] for name, each in seconds.items()}


@process_settings()
def time_layer(dim: int, hidden: int, rounds: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return seconds by round, and thread time, of a layer, of its dispatch and combine, and of bare all-to-alls."""
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
        dispatcher.combine(feed_forward(experts, rows, dispatched.rows_per_slot), dispatched).backward(upstream)
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
    """Return the share of the layer that dispatch and combine take beyond bare all-to-alls."""
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
            seconds = run_distributed(time_variants, world, Path(folder), options.rounds, timeout_s=1200)[0]
            for name, each in seconds.items():
                ratios = [stock / own for stock, own in zip(seconds[STOCK], each, strict=True)]
                by_hand = [other / own for other, own in zip(seconds[BY_HAND], each, strict=True)]
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
                        "x transformers by hand": round(statistics.median(by_hand), 3),
                    }
                )
            for dim, hidden in SHAPES:
                parts, busy = run_distributed(time_layer, world, dim, hidden, options.rounds, timeout_s=600)[0]
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
