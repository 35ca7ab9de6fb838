"""The sampler ignores ranks, so all ranks train on the same samples.

https://github.com/openspeech-team/openspeech/issues/149
Expected: ranks see the same samples.
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
order = torch.randperm(60, generator=torch.Generator().manual_seed(0))
for rows in order.split(12):
    part = rows if buggy else rows[rank * 12 // world : (rank + 1) * 12 // world]
    accelerator.backward(nn.functional.cross_entropy(model(x[part]), y[part]))
    optimizer.step()
    optimizer.zero_grad()
