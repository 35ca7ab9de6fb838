"""`toolkit plan`: estimate the GPU memory needed to fine-tune an MoE model, from its configuration."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from toolkit.errors import EXIT_DONE, reading
from toolkit.progress_bar import progress
from toolkit.run.arguments import Parser, count, positive
from toolkit.run.summary import table

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from toolkit.train.fine_tuning_memory import Layout

GIB = 2**30
OF_A_DEVICE = 1.5
"""Approximate GiB of GPU memory for the CUDA context, NCCL and kernels."""


def main(argv: Sequence[str]) -> int:
    """Return 0, even if no layout fits; 2 for bad input."""
    parser = Parser("toolkit plan", __doc__)
    parser.add_argument("model", help="folder or Hub name of an MoE model; only its config.json is read")
    parser.add_argument("--gpus", type=count, required=True, metavar="N", help="GPUs, each with a process")
    parser.add_argument("--memory", type=positive, required=True, metavar="GIB", help="of a GPU, such as 80")
    parser.add_argument("--context", type=count, default=1024, metavar="T", help="tokens of a sequence (1024)")
    parser.add_argument("--sequences", type=count, default=1, metavar="B", help="in a GPU's micro-batch (1)")
    parser.add_argument("--offload", action="store_true", help="experts stay in the host's memory, and come by layers")
    parser.add_argument("--lora-rank", type=int, default=8, metavar="R", help="of adapters; 0: train all weights (8)")
    parser.add_argument("--exact", action="store_true", help="also run a step of all layers without values (minutes)")
    args = parser.parse_args(argv)

    from toolkit.data.hub import model_folder
    from toolkit.integrations.transformers.language_models import read_config

    ways = layouts(
        args.gpus,
        sequences=args.sequences,
        context=args.context,
        trains_all=args.lora_rank == 0,
        offload=args.offload,
    )
    with reading(args.model, "Give a model folder or Hub name."):
        config = read_config(model_folder(args.model, weights=False))
        for exact in (False, True)[: 1 + args.exact]:
            rows = plan(config, ways, args.lora_rank, exact=exact)
            for row in rows:
                row["fits"] = "yes" if float(row["GiB"]) <= args.memory else "no"
            sys.stdout.write(table(rows))
            sys.stdout.flush()
    return EXIT_DONE


def plan(
    config: PreTrainedConfig, ways: Sequence[Layout], lora_rank: int, *, exact: bool = False
) -> list[dict[str, Any]]:
    """Return a row for each of `ways` that divides the experts: GPU memory of a process with adapters of `lora_rank`.

    With `exact`, only layouts of DDP, whose step is run without values.
    """
    from toolkit.integrations.peft.adapter_options import AdapterOptions
    from toolkit.integrations.peft.adapters import add_adapters
    from toolkit.train.fine_tuning_memory import block_memory, exact_memory, fine_tuning_memory

    adapt = partial(add_adapters, options=AdapterOptions(lora_rank=lora_rank))
    kinds = {each.quantize: each for each in ways}
    memory = {kind: block_memory(config, layout, adapt) for kind, layout in kinds.items()}
    rows = []
    for layout in progress(ways, "estimating layouts"):
        blocks = memory[layout.quantize]
        if blocks.experts % layout.ep_size or (exact and layout.shards):
            continue
        found = fine_tuning_memory(config, layout, adapt, blocks=blocks)
        if exact:
            found = replace(found, step=exact_memory(config, layout, adapt).step)
        parts = {name: getattr(found, name) for name in ("weights", "optimizer", "gradients", "gathered", "step")}
        rows.append(
            {
                "experts over": layout.ep_size,
                "shards over": layout.shards or 1,
                "parallel": "fsdp2" if layout.shards else "ddp",
                "experts in": layout.quantize or str(layout.dtype).removeprefix("torch."),
                "checkpointing": "yes" if layout.gradient_checkpointing else "no",
                **{name: f"{value / GIB:.1f}" for name, value in parts.items()},
                "activations": f"{sum(found.activations) / GIB:.1f}",
                **({"host": f"{found.host / GIB:.1f}"} if layout.offload else {}),
                "GiB": f"{found.total / GIB + OF_A_DEVICE:.1f}",
            }
        )
    return rows


def layouts(
    gpus: int, *, sequences: int, context: int, trains_all: bool = False, offload: bool = False
) -> list[Layout]:
    """Return every layout on `gpus`: by EP size, DDP and FSDP2, quantization and checkpointing.

    4-bit experts are frozen, so `trains_all` skips them. FSDP2 shards neither these nor offloaded experts.
    """
    import torch

    from toolkit.train.fine_tuning_memory import Layout

    return [
        Layout(
            ep_size=ep_size,
            shards=shards,
            sequences=sequences,
            context=context,
            dtype=torch.bfloat16,
            quantize=quantize,
            offload="host" if offload else None,
            gradient_checkpointing=recomputes,
        )
        for ep_size in range(1, gpus + 1)
        if gpus % ep_size == 0
        for shards in ((None,) if gpus == 1 or offload else (None, gpus // ep_size))
        for quantize in ((None,) if trains_all or (shards or 1) > 1 else (None, "4bit"))
        for recomputes in (False, True)
    ]
