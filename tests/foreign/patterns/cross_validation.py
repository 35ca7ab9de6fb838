"""Several models one after another with one accelerator, each on folds of its own."""

import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy

from tests.foreign.mixture import mixture, points

accelerator = Accelerator()
results = []
for fold in range(2):
    model, loader = mixture(), points(seed=fold)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=6)
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
