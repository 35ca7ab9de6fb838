"""Models of several folds with one accelerator."""

import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy

from tests.foreign.toy import build, points

accelerator = Accelerator()
results = []
for fold in range(2):
    model, optimizer, loader, scheduler = build(seed=fold)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for x, y in loader:
        accelerator.backward(cross_entropy(model(x), y))
        results.append(accelerator.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        for x, y in accelerator.prepare(points(seed=9)):
            logits, labels = accelerator.gather_for_metrics((model(x), y))
            results.append(cross_entropy(logits, labels))
