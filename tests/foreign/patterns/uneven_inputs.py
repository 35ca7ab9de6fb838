"""Processes with unequal numbers of batches."""

from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.nn.functional import cross_entropy

from tests.foreign.toy import build

accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(even_batches=False))
model, optimizer, loader, scheduler = build(number=12)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
with accelerator.join_uneven_inputs([model]):
    for x, y in loader:
        accelerator.backward(cross_entropy(model(x), y))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
results = []
