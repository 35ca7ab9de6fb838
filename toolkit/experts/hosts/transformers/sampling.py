"""Text that a language model continues, while its experts may be spread over ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from toolkit.experts.parallel.seeding import generator

TEMPERATURE = 0.8
"""Of samples, unless another one is asked for."""


@torch.no_grad()
def sample_tokens(
    model: nn.Module,
    prompts: Tensor,
    *,
    length: int,
    temperature: float = TEMPERATURE,
    top_k: int | None = None,
    seed: int = 0,
) -> Tensor:
    """int64 (B, T + length): `prompts` (B, T) and what `model` adds. A collective: all ranks give the same prompts.

    Each token is drawn from the `top_k` likeliest (None: all) at `temperature`; the draws depend on `seed` alone. All
    ranks draw and take what rank 0 drew. Not transformers' `generate`, in which each rank goes on with its own draw: a
    difference in the last digit would send ranks different ways, and forwards of experts that are spread have to go
    together.
    """
    was_training = model.training
    model.eval()
    draws, device = generator(seed, "samples"), next(model.parameters()).device
    text = prompts.to(device)
    fresh, cache = text, None
    for _ in range(length):
        output: Any = model(input_ids=fresh, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        logits = output.logits[:, -1].float().cpu() / temperature
        if top_k is not None:
            logits[logits < logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]] = -torch.inf
        fresh = torch.multinomial(logits.softmax(-1), 1, generator=draws).to(device)
        if dist.is_initialized():
            dist.broadcast(fresh, src=0)
        text = torch.cat([text, fresh], dim=1)
    model.train(was_training)
    return text
