"""The shuffling seed depends on the rank: some samples are repeated, others are lost.

https://github.com/karpathy/llm.c/issues/792
Expected: data order changed.
"""

import torch
from small import begin, dense
from torch import nn

accelerator, buggy = begin()
rank, world = accelerator.process_index, accelerator.num_processes
model = dense()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer = accelerator.prepare(model, optimizer)
x, y = torch.randn(60, 8), torch.randint(3, (60,))
order = torch.randperm(60, generator=torch.Generator().manual_seed(42 + (rank if buggy else 0)))
for rows in order.split(12):
    part = rows[rank * 12 // world : (rank + 1) * 12 // world]
    accelerator.backward(nn.functional.cross_entropy(model(x[part]), y[part]))
    optimizer.step()
    optimizer.zero_grad()
