"""Steps after every second micro-batch, with clipping and a schedule."""

from accelerate import Accelerator
from torch.nn.functional import cross_entropy

from tests.foreign.toy import build

accelerator = Accelerator(gradient_accumulation_steps=2)
model, optimizer, loader, scheduler = build()
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
results = []
for x, y in loader:
    with accelerator.accumulate(model):
        loss = cross_entropy(model(x), y)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            results.append(accelerator.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    results += [accelerator.gather(loss).mean(), scheduler.get_last_lr()[0]]
