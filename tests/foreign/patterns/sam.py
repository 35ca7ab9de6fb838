"""Sharpness-aware minimization by hand: gradients at weights perturbed along the gradients."""

import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy

from tests.foreign.toy import build

accelerator = Accelerator()
model, optimizer, loader, scheduler = build()
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
results = []
for x, y in loader:
    accelerator.backward(cross_entropy(model(x), y))
    parameters = list(model.parameters())
    with torch.no_grad():
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        shifts = [0.5 * p.grad / norm for p in parameters]
        torch._foreach_add_(parameters, shifts)
    optimizer.zero_grad()
    loss = cross_entropy(model(x), y)
    accelerator.backward(loss)
    with torch.no_grad():
        torch._foreach_sub_(parameters, shifts)
    results += [accelerator.clip_grad_norm_(parameters, 0.3), accelerator.gather(loss.detach()).mean()]
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
