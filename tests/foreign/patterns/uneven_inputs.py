"""Processes have other numbers of batches."""

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.nn.functional import cross_entropy

from tests.foreign.mixture import mixture, points

accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(even_batches=False))
model, loader = mixture(), points(number=12)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=6)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
with accelerator.join_uneven_inputs([model]):
    for x, y in loader:
        accelerator.backward(cross_entropy(model(x), y))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
results = []
