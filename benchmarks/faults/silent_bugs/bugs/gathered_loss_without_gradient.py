"""A batch statistic is summed over ranks in the forward pass, but its gradient is not in the backward pass.

https://github.com/lightly-ai/lightly/issues/1977
Expected: gradients too small.
"""

import torch
import torch.distributed as dist
from small import batch, begin, dense, sum_over_ranks

accelerator, buggy = begin()
model = dense()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer = accelerator.prepare(model, optimizer)
for step in range(5):
    x, _ = batch(step, accelerator)
    output = model(x)
    mean = output.sum(0) / (len(x) * accelerator.num_processes)
    if accelerator.num_processes > 1 and buggy:
        dist.all_reduce(mean)  # autograd ignores it
    else:
        mean = sum_over_ranks(mean)
    accelerator.backward((mean - 1).square().sum())
    optimizer.step()
    optimizer.zero_grad()
