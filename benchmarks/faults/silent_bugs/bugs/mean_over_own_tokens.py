"""Each rank takes the mean over its own tokens, although ranks have different numbers of tokens.

https://github.com/pytorch/torchtitan/issues/1842
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
    loss = nn.functional.cross_entropy(model(x), y, reduction="sum")
    count = (y != -100).sum()
    if not buggy:
        count = accelerator.reduce(count) / accelerator.num_processes
    accelerator.backward(loss / count)
    optimizer.step()
    optimizer.zero_grad()
