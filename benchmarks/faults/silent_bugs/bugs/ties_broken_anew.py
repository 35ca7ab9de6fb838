"""Activation checkpointing recomputes routing in the backward pass and breaks ties differently.

https://github.com/NVIDIA-NeMo/Automodel/pull/3140
Expected: router decides otherwise under recomputation.
"""

import torch
from small import MoEModel, batch, begin, saving
from torch import Tensor, nn

from toolkit.experts.layer.router import Routing
from toolkit.experts.parallel.gradient_average import GradientAverage
from toolkit.experts.parallel.ownership import owned
from toolkit.integrations.accelerate.prepare import prepare

accelerator, buggy = begin()


def reroute(x: Tensor) -> Routing:
    routing = route(x)
    calls.append(len(x))
    if buggy and len(calls) % 2 == 0:  # swap two experts of a rank
        routing.expert_ids_TK.copy_(torch.tensor([1, 0, 3, 2])[routing.expert_ids_TK])
    return routing


calls: list[int] = []
model = MoEModel(accelerator.num_processes)
model.recompute = True
route, model.moe.router.forward = model.moe.router.forward, reroute
optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
wrapped, optimizer = prepare(accelerator, model, optimizer)
save_checkpoint, load_checkpoint = saving(model, optimizer)
experts = owned(model.parameters())
for step in range(5):
    x, y = batch(step, accelerator)
    accelerator.backward(nn.functional.cross_entropy(wrapped(x), y))
    GradientAverage(experts).finish()
    optimizer.step()
    optimizer.zero_grad()
