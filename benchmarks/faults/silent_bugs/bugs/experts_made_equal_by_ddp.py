"""DDP takes experts for replicated weights, and gives all ranks those of rank 0.

https://github.com/microsoft/Tutel/issues/87
Expected: experts overwritten by rank 0.
"""

import torch
from small import Mixture, batch, begin, saving
from torch import nn

from toolkit.experts.parallel.sync import ExpertSync
from toolkit.integrations.accelerate.prepare import prepare

accelerator, buggy = begin()
model = Mixture(accelerator.num_processes)
optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
if buggy:
    wrapped, optimizer = accelerator.prepare(model, optimizer)
else:
    wrapped, optimizer = prepare(accelerator, model, optimizer)
save_checkpoint, load_checkpoint = saving(model, optimizer)
sync = ExpertSync(model.parameters())
for step in range(5):
    x, y = batch(step, accelerator)
    accelerator.backward(nn.functional.cross_entropy(wrapped(x), y))
    if not buggy:
        sync.before_clip()
    optimizer.step()
    optimizer.zero_grad()
