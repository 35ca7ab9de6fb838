"""Each rank clips by the norm of the gradients that it has, so by its own experts alone.

https://github.com/NVIDIA-NeMo/Automodel/issues/3816
Expected: local clip norm.
"""

import torch
from small import Mixture, batch, begin, saving
from torch import nn

from toolkit.experts.parallel.sync import ExpertSync
from toolkit.integrations.accelerate.prepare import prepare

accelerator, buggy = begin()
model = Mixture(accelerator.num_processes)
optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
wrapped, optimizer = prepare(accelerator, model, optimizer)
save_checkpoint, load_checkpoint = saving(model, optimizer)
sync = ExpertSync(model.parameters())
for step in range(5):
    x, y = batch(step, accelerator)
    accelerator.backward(nn.functional.cross_entropy(wrapped(x), y))
    sync.before_clip()
    clip = accelerator.clip_grad_norm_ if buggy else sync.clip
    clip(list(model.parameters()), 0.1)
    optimizer.step()
    optimizer.zero_grad()
