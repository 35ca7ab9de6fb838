"""Steps after every second micro-batch, with clipping and a schedule."""

import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy

from tests.foreign.mixture import mixture, points

accelerator = Accelerator(gradient_accumulation_steps=2)
model, loader = mixture(), points()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=6)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
results = []
for x, y in loader:
    with accelerator.accumulate(model):
        loss = cross_entropy(model(x), y)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            results.append(accelerator.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    results += [accelerator.gather(loss).mean(), scheduler.get_last_lr()[0]]
