"""The memory that a mixture was expected to take in each process, beside what it took: five models and layouts.

    python benchmarks/speed/expected_memory.py             eight minutes; needs 8 GB of memory and 2 GB on disk
    python benchmarks/speed/expected_memory.py --plan      what Qwen3-30B-A3B is expected to take on GPUs

For each case a checkpoint with random weights is written to a temporary folder and deleted at the end, and fresh
processes load it with `experts_in_files()`, add adapters, spread the experts and make three steps. `took` is the most
that a process had of its own (anonymous pages) beyond what it had after its imports; `expected` is what `toolkit plan`
says from the configuration alone, without what it adds for a GPU's context.

In float32: in bf16 oneDNN keeps a kernel for each number of rows that an expert got, some 0.5 GB more on a CPU. The C
library gives freed memory back (MALLOC_MMAP_THRESHOLD_), because how much it keeps says nothing of other allocators.
Writes benchmarks/results/expected_memory.json, or with --plan fine_tuning_plan.json.
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
    """A model, and how it is fine-tuned."""

    family: str
    sizes: dict[str, Any]
    layout: Layout

    def config(self) -> Any:
        """The configuration of transformers."""
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
    """Write a model of `case` with random weights."""
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_config(case.config(), dtype=case.layout.dtype).save_pretrained(folder)


def take(folder: Path, case: Case) -> float:
    """GB that one rank takes to load the model and make some steps."""
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
    wrapped.train()  # transformers computes blocks again in this mode alone
    draws = torch.Generator().manual_seed(experts.accelerator.process_index)
    for _ in range(STEPS):
        tokens = torch.randint(32_000, (layout.sequences, layout.context + 1), generator=draws)
        experts.accelerator.backward(LanguageModeling().loss(wrapped, {"tokens": tokens}).sum)
        optimizer.step()
        optimizer.zero_grad()
    return watch.peaks()[0]


def row(case: Case) -> dict[str, Any]:
    """Expected and measured, of the rank that takes most."""
    layout = case.layout
    expected = fine_tuning_memory(case.config(), layout, partial(add_adapters, options=AdapterOptions())).total / 1e9
    with tempfile.TemporaryDirectory() as folder:
        run_distributed(write_checkpoint, 1, Path(folder), case, timeout_s=600)
        took = max(run_distributed(take, layout.ep_size, Path(folder), case, timeout_s=600))
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
    """What Qwen3-30B-A3B is expected to take with adapters, a sequence of 4,096 tokens on each GPU."""
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
    asked: dict[str, Any] = {"sequences": 1, "context": 4096}
    rows = plan(config, [*layouts(8, **asked), *layouts(8, **asked, offload=True)], lora_rank=8)
    return [{"host": None} | row for row in rows]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", action="store_true", help="of Qwen3-30B-A3B, on GPUs")
    if parser.parse_args().plan:
        write_report("fine_tuning_plan", plans())
        return 0
    os.environ["MALLOC_MMAP_THRESHOLD_"] = os.environ["MALLOC_TRIM_THRESHOLD_"] = "262144"  # of processes to come
    write_report("expected_memory", [row(case) for case in CASES], steps=STEPS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
