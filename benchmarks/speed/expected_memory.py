"""Expected and measured memory per process when fine-tuning MoE models: five models and layouts.

    python benchmarks/speed/expected_memory.py             eight minutes; needs 8 GB of memory and 2 GB on disk
    python benchmarks/speed/expected_memory.py --plan      expected memory of Qwen3-30B-A3B on GPUs

For each case, new processes load a temporary checkpoint with random weights by `experts_in_files()`, add adapters,
shard the experts and train three steps. `took` is the peak of private anonymous pages of a process after its imports.
`expected` is the estimate of `toolkit plan` from the configuration, without a GPU context.

In float32, because in bf16 oneDNN caches a kernel for each number of rows of an expert, about 0.5 GB on a CPU. The C
library returns freed memory (MALLOC_MMAP_THRESHOLD_), so results do not depend on its cache. Writes
benchmarks/results/expected_memory.json, or with --plan fine_tuning_plan.json.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch

from benchmarks.report import write_report
from benchmarks.speed.large_checkpoint import Watch
from benchmarks.support.processes import run_distributed
from toolkit.commands.plan import layouts, plan
from toolkit.integrations.peft.adapter_options import AdapterOptions
from toolkit.integrations.peft.adapters import add_adapters
from toolkit.train.fine_tuning_memory import Layout, fine_tuning_memory
from toolkit.train.tasks.language_modeling import LanguageModeling

STEPS = 3


@dataclass(frozen=True)
class Case:
    """A model and its fine-tuning layout."""

    family: str
    sizes: dict[str, Any]
    layout: Layout

    def config(self) -> Any:
        from transformers import AutoConfig

        return AutoConfig.for_model(self.family, **self.sizes)


def _layout(ep_size: int, tokens: int, quantize: Literal["4bit"] | None = None, *, recomputes: bool = False) -> Layout:
    return Layout(
        ep_size=ep_size,
        sequences=1,
        context=tokens,
        dtype=torch.float32,
        quantize=quantize,
        gradient_checkpointing=recomputes,
    )


QWEN: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "tie_word_embeddings": True,
}
CASES = [
    Case("qwen3_moe", QWEN, _layout(1, 512)),
    Case("qwen3_moe", QWEN, _layout(2, 2048)),
    Case("qwen3_moe", QWEN, _layout(2, 2048, recomputes=True)),
    Case(
        "mixtral",
        {
            "vocab_size": 32_000,
            "hidden_size": 1024,
            "intermediate_size": 3584,
            "num_hidden_layers": 4,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "num_local_experts": 8,
        },
        _layout(2, 1024, "4bit"),
    ),
    Case(
        "olmoe",
        {
            "vocab_size": 50_304,
            "hidden_size": 1024,
            "intermediate_size": 1024,
            "num_hidden_layers": 3,
            "num_attention_heads": 16,
            "num_experts": 64,
            "num_experts_per_tok": 8,
        },
        _layout(4, 512),
    ),
]


def write_checkpoint(folder: Path, case: Case) -> None:
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_config(case.config(), dtype=case.layout.dtype).save_pretrained(folder)


def memory_in_gb(folder: Path, case: Case) -> float:
    """Load and train the model, and return the peak memory of this rank in GB."""
    import peft  # noqa: F401
    from accelerate import Accelerator
    from transformers import AutoModelForCausalLM

    from toolkit.integrations.accelerate.expert_parallel import ExpertParallel
    from toolkit.integrations.transformers import experts_in_files, recompute_blocks, use_toolkit_kernel

    kernel, layout = use_toolkit_kernel(), case.layout
    watch = Watch(limit=float("inf"))
    with experts_in_files(quantize=layout.quantize):
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=layout.dtype, experts_implementation=kernel)
    if layout.gradient_checkpointing:
        recompute_blocks(base)
    model: Any = add_adapters(base, AdapterOptions())
    experts = ExpertParallel(Accelerator(cpu=True))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    wrapped, optimizer = experts.prepare(model, torch.optim.AdamW(trained, lr=1e-3, fused=True))
    wrapped.train()  # transformers checkpoints activations only in this mode
    draws = torch.Generator().manual_seed(experts.accelerator.process_index)
    for _ in range(STEPS):
        tokens = torch.randint(32_000, (layout.sequences, layout.context + 1), generator=draws)
        experts.accelerator.backward(LanguageModeling().loss(wrapped, {"tokens": tokens}).sum)
        optimizer.step()
        optimizer.zero_grad()
    return watch.peaks()[0]


def row(case: Case) -> dict[str, Any]:
    """Return expected and measured memory, the maximum over ranks."""
    layout = case.layout
    expected = fine_tuning_memory(case.config(), layout, partial(add_adapters, options=AdapterOptions())).total / 1e9
    with tempfile.TemporaryDirectory() as folder:
        run_distributed(write_checkpoint, 1, Path(folder), case, timeout_s=600)
        took = max(run_distributed(memory_in_gb, layout.ep_size, Path(folder), case, timeout_s=600))
    return {
        "model": case.family,
        "processes": layout.ep_size,
        "tokens": layout.context,
        "experts in": layout.quantize or "float32",
        "gradient checkpointing": "yes" if layout.gradient_checkpointing else "no",
        "expected GB": round(expected, 2),
        "took GB": round(took, 2),
        "expected / took": round(expected / took, 3),
    }


def plans() -> list[dict[str, Any]]:
    """Return the expected memory of Qwen3-30B-A3B with adapters and a sequence of 4,096 tokens per GPU."""
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(
        vocab_size=151_936,
        hidden_size=2048,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,  # type: ignore[call-arg]
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
    )
    batch: dict[str, Any] = {"sequences": 1, "context": 4096}
    ways = {8: [*layouts(8, **batch), *layouts(8, **batch, offload=True)], 1: layouts(1, **batch, offload=True)}
    found = {rank: plan(config, each, lora_rank=rank) for rank, each in ways.items()}
    return [{"rank": rank, "host": None} | row for rank, rows in found.items() for row in rows]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", action="store_true", help="estimate Qwen3-30B-A3B on GPUs")
    if parser.parse_args().plan:
        write_report("fine_tuning_plan", plans())
        return 0
    os.environ["MALLOC_MMAP_THRESHOLD_"] = os.environ["MALLOC_TRIM_THRESHOLD_"] = "262144"  # inherited by new processes
    write_report("expected_memory", [row(case) for case in CASES], steps=STEPS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
