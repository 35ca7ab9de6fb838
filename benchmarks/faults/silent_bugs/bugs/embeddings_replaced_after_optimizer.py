"""Embeddings are resized after the optimizer is created, so the new weights are never updated.

https://github.com/huggingface/transformers/pull/3532
Expected: parameter outside the optimizer.
"""

import torch
from small import batch, begin
from torch import nn

accelerator, buggy = begin()
model = nn.Sequential(nn.Embedding(10, 16), nn.Linear(16, 3))
if not buggy:
    model[0] = nn.Embedding(20, 16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
if buggy:
    model[0] = nn.Embedding(20, 16)
model, optimizer = accelerator.prepare(model, optimizer)
for step in range(5):
    x, y = batch(step, accelerator)
    tokens = (x[:, 0].abs() * 9).long().clamp(max=19)
    accelerator.backward(nn.functional.cross_entropy(model(tokens), y))
    optimizer.step()
    optimizer.zero_grad()
