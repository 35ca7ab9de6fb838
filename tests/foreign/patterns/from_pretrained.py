"""`save_model` writes weights that a model which was never prepared reads."""

import os

import torch
from accelerate import Accelerator, load_checkpoint_in_model
from torch.nn.functional import cross_entropy

from tests.foreign.mixture import mixture, points

accelerator = Accelerator()
model, loader = mixture(), points()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=6)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
for x, y in loader:
    accelerator.backward(cross_entropy(model(x), y))
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
folder = os.path.join(os.environ["FOREIGN_FOLDER"], "model")
accelerator.save_model(model, folder)
accelerator.wait_for_everyone()
whole = mixture()
load_checkpoint_in_model(whole, folder)
results = list(whole(torch.ones(1, 5, dtype=torch.float64)).flatten().detach())
