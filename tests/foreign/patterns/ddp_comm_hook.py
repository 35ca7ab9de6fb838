"""DDP communicates gradients in half precision."""

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import DDPCommunicationHookType
from torch.nn.functional import cross_entropy

from tests.foreign.toy import build

hook = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
accelerator = Accelerator(kwargs_handlers=[hook])
model, optimizer, loader, scheduler = build(optimizer=torch.optim.SGD)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
results = []
for x, y in loader:
    loss = cross_entropy(model(x), y)
    accelerator.backward(loss)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    results.append(accelerator.gather(loss.detach()).mean())
