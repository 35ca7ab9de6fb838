"""Gradients of experts are summed over the ranks' batches, where those of other weights are averaged.

https://github.com/databricks/megablocks/pull/20
Expected: gradients W times too large.
"""

import torch
from small import Mixture, batch, begin, saving
from torch import nn

from toolkit.experts.parallel.gradients import average_owned_gradients
from toolkit.experts.parallel.ownership import owned
from toolkit.integrations.accelerate.prepare import prepare

accelerator, buggy = begin()
model = Mixture(accelerator.num_processes)
optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
wrapped, optimizer = prepare(accelerator, model, optimizer)
save_checkpoint, load_checkpoint = saving(model, optimizer)
for step in range(5):
    x, y = batch(step, accelerator)
    accelerator.backward(nn.functional.cross_entropy(wrapped(x), y))
    average_owned_gradients(owned(model.parameters()), 1 if buggy else accelerator.num_processes)
    optimizer.step()
    optimizer.zero_grad()
