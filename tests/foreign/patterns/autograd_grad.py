"""Gradients by `torch.autograd.grad`, which the script reduces, because DDP does not average them."""

import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy

from tests.foreign.toy import build

accelerator = Accelerator()
model, optimizer, loader, scheduler = build()
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
results = []
for x, y in loader:
    loss = cross_entropy(model(x), y)
    parameters = list(model.parameters())
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.grad = accelerator.reduce(gradient, "mean")
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    results.append(accelerator.gather(loss.detach()).mean())
