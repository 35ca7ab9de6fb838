"""Steps under torch's profiler."""

import torch
from accelerate import Accelerator
from accelerate.utils import ProfileKwargs
from torch.nn.functional import cross_entropy

from tests.foreign.mixture import mixture, points

accelerator = Accelerator(kwargs_handlers=[ProfileKwargs(activities=["cpu"])])
model, loader = mixture(), points()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=6)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
results = []
with accelerator.profile() as profiler:
    for x, y in loader:
        loss = cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        results.append(accelerator.gather(loss.detach()).mean())
assert len(profiler.key_averages()) > 0
