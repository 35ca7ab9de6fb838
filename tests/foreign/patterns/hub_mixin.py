"""A model of a script's own with the Hub's methods, which read its state dict."""

import os

import torch
from accelerate import Accelerator
from huggingface_hub import PyTorchModelHubMixin
from torch.nn.functional import cross_entropy

from tests.foreign.mixture import points
from tests.integrations.accelerate.test_expert_parallel import Model


class HubModel(Model, PyTorchModelHubMixin): ...


accelerator = Accelerator()
model, loader = HubModel().double(), points()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=6)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
for x, y in loader:
    accelerator.backward(cross_entropy(model(x), y))
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
folder = os.path.join(os.environ["FOREIGN_FOLDER"], "model")
accelerator.unwrap_model(model).save_pretrained(folder)
accelerator.wait_for_everyone()
whole = HubModel.from_pretrained(folder).double()
results = list(whole(torch.ones(1, 5, dtype=torch.float64)).flatten().detach())
