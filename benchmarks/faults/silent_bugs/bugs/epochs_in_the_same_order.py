"""`set_epoch` of the sampler is not called, so every epoch has the order of the first epoch.

https://github.com/huggingface/transformers/issues/4398
Expected: every epoch in the same order.
"""

import torch
from small import begin, dense
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

accelerator, buggy = begin()
rank, world = accelerator.process_index, accelerator.num_processes
model = dense()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer = accelerator.prepare(model, optimizer)
data = TensorDataset(torch.randn(24, 8), torch.randint(3, (24,)))
sampler: DistributedSampler[int] = DistributedSampler(data, num_replicas=world, rank=rank, shuffle=True)
loader = DataLoader(data, batch_size=12 // world, sampler=sampler)
for epoch in range(3):
    if not buggy:
        sampler.set_epoch(epoch)
    for x, y in loader:
        accelerator.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
