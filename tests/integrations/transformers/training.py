"""Training of models with sharded experts."""

from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from benchmarks.support.families import tokens
from toolkit.integrations.accelerate.expert_parallel import ExpertParallel


def adamw(model: nn.Module, lr: float = 1e-2) -> Any:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)


def prepare(model: nn.Module, lr: float = 1e-2, **options: Any) -> tuple[ExpertParallel, Any, Any]:
    """Return expert parallelism with `options`, and the prepared model and optimizer."""
    experts = ExpertParallel(Accelerator(cpu=True), **options)
    return experts, *experts.prepare(model, adamw(model, lr))


def enable_checkpointing(model: Any, *, use_reentrant: bool) -> None:
    # transformers renamed the method in 5.23.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": use_reentrant})


def train_step(
    accelerator: Any, model: Any, optimizer: Any, step: int, *, samples: int = 8, clip: float | None = None
) -> float:
    """Train on this rank's part of the global batch of `step`; return the mean loss over ranks."""
    share = samples // accelerator.num_processes
    ids = tokens(step, samples)[accelerator.process_index * share :][:share]
    loss = model(input_ids=ids, labels=ids).loss
    accelerator.backward(loss)
    if clip is not None:
        accelerator.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad()
    return float(accelerator.reduce(loss.detach().float(), "mean"))
