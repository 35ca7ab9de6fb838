"""A layer is frozen when DDP is created and unfrozen later, so its gradients are not averaged.

https://github.com/facebookresearch/detectron2/issues/2486
Expected: parameter unfrozen after prepare.
"""

import torch
from small import batch, begin, dense
from torch import nn

accelerator, buggy = begin()
model = dense()
optimizer = torch.optim.AdamW([{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.0}], 1e-2)
if buggy:
    model[2].requires_grad_(False)
model, optimizer = accelerator.prepare(model, optimizer)
for step in range(5):
    x, y = batch(step, accelerator)
    if step == 1:
        accelerator.unwrap_model(model)[2].requires_grad_(True)
        optimizer.param_groups[1]["lr"] = 1e-2
    accelerator.backward(nn.functional.cross_entropy(model(x), y))
    optimizer.step()
    optimizer.zero_grad()
