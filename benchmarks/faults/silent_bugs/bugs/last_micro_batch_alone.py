"""Each micro-batch overwrites the gradient buffer, so only the last one has an effect.

https://github.com/ServiceNow/Fast-LLM/pull/551
Expected: micro-batch lost.
"""

import torch
from small import batch, begin, dense
from torch import nn

accelerator, buggy = begin()
model = dense()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer = accelerator.prepare(model, optimizer)
for step in range(5):
    x, y = batch(step, accelerator)
    for rows, targets in zip(x.chunk(2), y.chunk(2), strict=True):
        if buggy:
            optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(rows), targets, reduction="sum")
        accelerator.backward(loss * accelerator.num_processes / 12)
    optimizer.step()
    optimizer.zero_grad()
