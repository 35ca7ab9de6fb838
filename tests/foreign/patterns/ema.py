"""An exponential moving average of the weights in a copy of the prepared model."""

import copy

import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy

from tests.foreign.toy import build

accelerator = Accelerator()
model, optimizer, loader, scheduler = build()
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
average = copy.deepcopy(accelerator.unwrap_model(model)).requires_grad_(False)
results = []
for x, y in loader:
    accelerator.backward(cross_entropy(model(x), y))
    results.append(accelerator.clip_grad_norm_(model.parameters(), 0.3))
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
            mean.lerp_(parameter, 0.1)
        results.append(accelerator.gather(cross_entropy(average(x), y)).mean())
