"""Gradients are clipped by the mean of the ranks' norms, although each rank has different experts.

https://github.com/deepspeedai/DeepSpeed/issues/8475
Expected: local clip norm.
"""

import torch
from small import MoEModel, batch, begin, saving
from torch import nn

from toolkit.experts.parallel.gradient_average import GradientAverage
from toolkit.experts.parallel.ownership import owned
from toolkit.experts.parallel.sync import clip_gradients
from toolkit.integrations.accelerate.prepare import prepare

accelerator, buggy = begin()
model = MoEModel(accelerator.num_processes)
optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
wrapped, optimizer = prepare(accelerator, model, optimizer)


def clip_by_mean(parameters: list[nn.Parameter], max_norm: float) -> None:
    own = torch.stack([p.grad.norm() for p in parameters if p.grad is not None]).norm()
    mean = accelerator.reduce(own.clone(), reduction="mean")
    torch.nn.utils.clip_grad_norm_(parameters, max_norm * float(own / mean))


save_checkpoint, load_checkpoint = saving(model, optimizer)
experts = owned(model.parameters())
for step in range(5):
    x, y = batch(step, accelerator)
    accelerator.backward(nn.functional.cross_entropy(wrapped(x), y))
    GradientAverage(experts).finish()
    clip = clip_by_mean if buggy else clip_gradients
    clip(list(model.parameters()), 0.1)
    optimizer.step()
    optimizer.zero_grad()
