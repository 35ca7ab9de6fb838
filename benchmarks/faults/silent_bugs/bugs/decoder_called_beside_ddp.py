"""Part of the model is called without DDP, so its gradients are not averaged.

https://github.com/bytetriper/RAE/issues/40
Expected: unsynchronised replica.
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
    output = (accelerator.unwrap_model(model) if buggy else model)(x)
    accelerator.backward(nn.functional.cross_entropy(output, y))
    optimizer.step()
    optimizer.zero_grad()
