"""An optimizer with training and evaluation modes instead of a schedule."""

import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy

from tests.foreign.toy import build
from tests.support.optimizers import ScheduleFreeSGD

accelerator = Accelerator()
model, _, loader, _ = build()
optimizer = ScheduleFreeSGD(model.parameters(), lr=0.5)
scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
results = []
optimizer.train()
for x, y in loader:
    loss = cross_entropy(model(x), y)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    results.append(accelerator.gather(loss.detach()).mean())
optimizer.eval()
with torch.no_grad():
    results += [accelerator.gather(cross_entropy(model(x), y)).mean() for x, y in loader]
