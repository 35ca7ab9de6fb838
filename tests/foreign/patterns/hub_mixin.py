"""A model with the methods of the Hub, which read its state dict, and `save_model`: unprepared models load both."""

import os

import torch
from accelerate import Accelerator, load_checkpoint_in_model
from huggingface_hub import PyTorchModelHubMixin
from torch.nn.functional import cross_entropy

from tests.foreign.toy import Model, build


class HubModel(Model, PyTorchModelHubMixin): ...


accelerator = Accelerator()
model, optimizer, loader, scheduler = build(HubModel())
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
for x, y in loader:
    accelerator.backward(cross_entropy(model(x), y))
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
folder = os.path.join(os.environ["FOREIGN_FOLDER"], "model")
accelerator.unwrap_model(model).save_pretrained(folder)
accelerator.save_model(model, f"{folder}s")
accelerator.wait_for_everyone()
loaded = HubModel()
load_checkpoint_in_model(loaded, f"{folder}s")
ones = torch.ones(1, 5, dtype=torch.float64)
results = [
    value for each in (loaded, HubModel.from_pretrained(folder)) for value in each.double()(ones).flatten().detach()
]
