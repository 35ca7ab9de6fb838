"""Low-rank adapters of experts in one process: unmodified PEFT, the toolkit, and full fine-tuning.

    python benchmarks/speed/expert_adapters.py                 16 and 64 experts, r = 8, about two minutes on two cores
    python benchmarks/speed/expert_adapters.py --rehearse      one small model, two rounds; writes nothing

Forward and backward pass of a Qwen3-MoE in float32 with a frozen base and adapters of attention's q and v and of all
expert matrices. Unmodified PEFT and full fine-tuning use transformers' `grouped_mm` experts. Variants alternate within
each round; rates use median seconds. Peak memory is the allocation beyond the model in torch's profiler, in a separate
pass. Losses of PEFT and the toolkit are compared first. Writes benchmarks/results/expert_adapters.json; exit code 1 if
a target is missed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.report import write_report
from benchmarks.support.peak_memory import peak_bytes
from toolkit.integrations.transformers import causal_lm

DIM, HIDDEN, TOP_K, LAYERS, VOCAB, RANK = 512, 512, 4, 2, 1024, 8
TOKENS = (4, 128)
FASTER = {16: 1.5, 64: 1.8}
"""Target by number of experts: throughput relative to unmodified PEFT."""
MOST_MEMORY = 0.5
"""Target: peak memory relative to unmodified PEFT."""


def build(experts: int, kind: str) -> Any:
    from accelerate import Accelerator
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen3MoeConfig

    from toolkit.integrations.accelerate.expert_parallel import ExpertParallel

    torch.manual_seed(0)
    settings: Any = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=DIM,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=8,
        intermediate_size=HIDDEN,
        moe_intermediate_size=HIDDEN,
        num_experts=experts,
        num_experts_per_tok=TOP_K,
        use_cache=False,
    )
    model: Any = causal_lm(settings, experts_implementation="grouped_mm")
    if kind == "full":
        return model
    adapters = LoraConfig(
        r=RANK,
        target_modules=["q_proj", "v_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        init_lora_weights=False,
    )
    model = get_peft_model(model, adapters)
    if kind == "ours":
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
        model, _ = ExpertParallel(Accelerator(cpu=True)).prepare(model, optimizer)
    return model


def step(model: Any, ids: torch.Tensor) -> Callable[[], float]:
    """Return a forward and backward pass with newly allocated gradients."""

    def work() -> float:
        model.zero_grad(set_to_none=True)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return float(loss)

    return work


def measure(experts: int, rounds: int) -> list[dict[str, Any]]:
    ids = torch.randint(VOCAB, TOKENS, generator=torch.Generator().manual_seed(1))
    works = {kind: step(build(experts, kind), ids) for kind in ("stock", "ours", "full")}
    losses = {kind: work() for kind, work in works.items()}
    assert abs(losses["ours"] - losses["stock"]) < 1e-4 * losses["stock"], losses
    peaks = {}
    for kind, work in works.items():
        with torch.profiler.profile(profile_memory=True) as profile:
            work()
        peaks[kind] = peak_bytes(profile)
    seconds: dict[str, list[float]] = {kind: [] for kind in works}
    for _ in range(rounds):
        for kind, work in works.items():
            began = time.perf_counter()
            work()
            seconds[kind].append(time.perf_counter() - began)
    medians = {kind: statistics.median(each) for kind, each in seconds.items()}
    tokens = TOKENS[0] * TOKENS[1]
    return [
        {
            "experts": experts,
            "contender": {"stock": "stock PEFT", "ours": "ours", "full": "full fine-tuning"}[kind],
            "tokens per second": round(tokens / medians[kind]),
            "x stock PEFT": round(medians["stock"] / medians[kind], 2),
            "peak MB beyond the model": round(peaks[kind] / 1e6, 1),
            "memory x stock PEFT": round(peaks[kind] / peaks["stock"], 2),
        }
        for kind in works
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rehearse", action="store_true", help="tiny case; writes nothing")
    arguments = parser.parse_args()
    if arguments.rehearse:
        print(*measure(4, 2), sep="\n")
        return 0
    rows = [row for experts in FASTER for row in measure(experts, arguments.rounds)]
    write_report("expert_adapters", rows, rank=RANK, tokens=TOKENS, rounds=arguments.rounds)
    toolkit = [row for row in rows if row["contender"] == "ours"]
    met = all(
        row["x stock PEFT"] >= FASTER[row["experts"]] and row["memory x stock PEFT"] <= MOST_MEMORY for row in toolkit
    )
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
