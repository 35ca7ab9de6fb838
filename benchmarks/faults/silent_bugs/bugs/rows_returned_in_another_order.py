"""Expert outputs are combined in a different order than inputs were dispatched.

https://github.com/pytorch/torchtitan/issues/1237
Expected: wrong inverse permutation.
"""

import torch
from small import MoEModel, batch, begin, saving
from torch import nn

from toolkit.experts.parallel.gradient_average import GradientAverage
from toolkit.experts.parallel.ownership import owned
from toolkit.integrations.accelerate.prepare import prepare

accelerator, buggy = begin()
model = MoEModel(accelerator.num_processes)
optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
wrapped, optimizer = prepare(accelerator, model, optimizer)
dispatcher = model.moe.expert_stack.dispatcher
if buggy and accelerator.num_processes > 1:
    combine = dispatcher.combine
    dispatcher.combine = lambda rows, dispatched: combine(rows.flip(0), dispatched)
save_checkpoint, load_checkpoint = saving(model, optimizer)
experts = owned(model.parameters())
for step in range(5):
    x, y = batch(step, accelerator)
    accelerator.backward(nn.functional.cross_entropy(wrapped(x), y))
    GradientAverage(experts).finish()
    optimizer.step()
    optimizer.zero_grad()
