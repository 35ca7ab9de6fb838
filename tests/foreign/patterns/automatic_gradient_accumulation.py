"""Micro-batches of half the size after running out of memory."""

from accelerate import Accelerator
from accelerate.utils import find_executable_batch_size
from torch.nn.functional import cross_entropy

from tests.foreign.toy import build

OBSERVED = 8
accelerator = Accelerator()
results = []


@find_executable_batch_size(starting_batch_size=OBSERVED)
def train(batch_size):
    accelerator.free_memory()
    accelerator.gradient_accumulation_steps = OBSERVED // batch_size
    model, optimizer, loader, scheduler = build(batch_size=batch_size)
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
