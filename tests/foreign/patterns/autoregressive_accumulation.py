"""Losses divided by the number of labels of all processes and micro-batches, with `no_sync`."""

import contextlib

import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy

from tests.foreign.toy import build

accelerator = Accelerator()
model, optimizer, loader, scheduler = build()
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
results = []
batches = iter(loader)
for _ in range(3):
    micro_batches = [next(batches) for _ in range(2)]
    labels = accelerator.gather(torch.tensor([sum(int((y != 2).sum()) for _, y in micro_batches)])).sum().item()
    for number, (x, y) in enumerate(micro_batches):
        with accelerator.no_sync(model) if number == 0 else contextlib.nullcontext():
            loss = cross_entropy(model(x), y, ignore_index=2, reduction="sum") * accelerator.num_processes / labels
            accelerator.backward(loss)
        results.append(accelerator.gather(loss.detach()).sum())
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
