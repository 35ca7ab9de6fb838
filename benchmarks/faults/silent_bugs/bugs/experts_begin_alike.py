"""Every rank initializes its experts from the same seed, so experts of different ranks are identical.

https://github.com/laekov/fastmoe/pull/4
Expected: initial weights differ.
"""

import torch
from small import MoEModel, batch, begin, saving
from torch import nn

from toolkit.experts.parallel.gradient_average import GradientAverage
from toolkit.experts.parallel.ownership import owned
from toolkit.integrations.accelerate.prepare import prepare

accelerator, buggy = begin()
model = MoEModel(accelerator.num_processes)
if buggy:
    torch.manual_seed(1)
    for parameter in model.moe.expert_stack.parameters.values():
        nn.init.normal_(parameter, std=0.1)
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
