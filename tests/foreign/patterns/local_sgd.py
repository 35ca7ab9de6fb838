"""Processes step by themselves, and weights are averaged now and then; begun after ten ordinary steps."""

import torch
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from torch.nn.functional import cross_entropy

from tests.foreign.mixture import mixture, points

accelerator = Accelerator()
model, loader = mixture(), points(number=96)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=6)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
batches = iter(loader)
for local in (False, True):
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=1, enabled=local) as local_sgd:
        for _ in range(10 if not local else 2):
            x, y = next(batches)
            accelerator.backward(cross_entropy(model(x), y))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            local_sgd.step()
results = []
