"""Where a batch does not fit, half as many samples are taken for twice as many micro-batches of a step."""

import torch
from accelerate import Accelerator
from accelerate.utils import find_executable_batch_size
from torch.nn.functional import cross_entropy

from tests.foreign.mixture import mixture, points

OBSERVED = 8
accelerator = Accelerator()
results = []


@find_executable_batch_size(starting_batch_size=OBSERVED)
def train(batch_size):
    accelerator.free_memory()
    accelerator.gradient_accumulation_steps = OBSERVED // batch_size
    model, loader = mixture(), points(batch_size=batch_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=6)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = cross_entropy(model(x), y)
            accelerator.backward(loss)
            if batch_size > 4:
                raise RuntimeError("CUDA out of memory.")
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            results.append(accelerator.gather(loss.detach()).mean())


train()
