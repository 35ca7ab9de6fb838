"""`save_model` writes weights that an unprepared model loads."""

import os

import torch
from accelerate import Accelerator, load_checkpoint_in_model
from torch.nn.functional import cross_entropy

from tests.foreign.toy import build

accelerator = Accelerator()
model, optimizer, loader, scheduler = build()
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
for x, y in loader:
    accelerator.backward(cross_entropy(model(x), y))
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
folder = os.path.join(os.environ["FOREIGN_FOLDER"], "model")
accelerator.save_model(model, folder)
accelerator.wait_for_everyone()
loaded, *_ = build()
load_checkpoint_in_model(loaded, folder)
results = list(loaded(torch.ones(1, 5, dtype=torch.float64)).flatten().detach())
