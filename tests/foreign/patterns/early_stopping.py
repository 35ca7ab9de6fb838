"""One process sees that it is enough, and all end."""

import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy

from tests.foreign.mixture import mixture, points

accelerator = Accelerator()
model, loader = mixture(), points()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=6)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
results = []
for step, (x, y) in enumerate(loader):
    loss = cross_entropy(model(x), y)
    accelerator.backward(loss)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    results.append(accelerator.gather(loss.detach()).mean())
    if step == 3 and accelerator.is_main_process:
        accelerator.set_trigger()
    if accelerator.check_trigger():
        break
