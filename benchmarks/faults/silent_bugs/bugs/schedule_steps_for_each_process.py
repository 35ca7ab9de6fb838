"""The learning rate schedule advances once per process in each step.

https://github.com/huggingface/transformers/pull/24088
Expected: learning rate depends on the world.
"""

import torch
from small import batch, begin, dense
from torch import nn

accelerator, buggy = begin()
model = dense()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer = accelerator.prepare(model, optimizer)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=20)
for step in range(5):
    x, y = batch(step, accelerator)
    accelerator.backward(nn.functional.cross_entropy(model(x), y))
    optimizer.step()
    for _ in range(accelerator.num_processes if buggy else 1):
        schedule.step()
    optimizer.zero_grad()
