"""Expert gradients are summed over the ranks' batches; non-expert gradients are averaged.

https://github.com/databricks/megablocks/pull/20
Expected: gradients W times too large.
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
save_checkpoint, load_checkpoint = saving(model, optimizer)
experts = owned(model.parameters())
for step in range(5):
    x, y = batch(step, accelerator)
    accelerator.backward(nn.functional.cross_entropy(wrapped(x), y))
    GradientAverage(experts).finish()
    for parameter in experts if buggy else ():
        parameter.grad *= accelerator.num_processes
    optimizer.step()
    optimizer.zero_grad()
