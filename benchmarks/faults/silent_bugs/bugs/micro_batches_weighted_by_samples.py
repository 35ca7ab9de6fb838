"""Micro-batches, each a mean over its tokens, are weighted by their samples and not by their tokens.

https://github.com/verl-project/verl/issues/5625
Expected: loss normalised by rank.
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
    y[x[:, 0] > 0] = -100  # no target
    total = accelerator.reduce((y != -100).sum()) / accelerator.num_processes
    for rows, targets in zip(x.chunk(2), y.chunk(2), strict=True):
        loss = nn.functional.cross_entropy(model(rows), targets, reduction="sum")
        weight = len(rows) / len(x) / (targets != -100).sum().clamp(min=1) if buggy else 1 / total
        accelerator.backward(loss * weight)
    optimizer.step()
    optimizer.zero_grad()
