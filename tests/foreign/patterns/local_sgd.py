"""Processes step independently and average their weights now and then, after ten ordinary steps."""

from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from torch.nn.functional import cross_entropy

from tests.foreign.toy import build

accelerator = Accelerator()
model, optimizer, loader, scheduler = build(number=96)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
batches = iter(loader)
for local in (False, True):
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=1, enabled=local) as local_sgd:
        for _ in range(10 if not local else 2):
            x, y = next(batches)
            accelerator.backward(cross_entropy(model(x), y))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            local_sgd.step()
results = []
