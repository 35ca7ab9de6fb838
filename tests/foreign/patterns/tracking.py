"""Losses go to a tracker of one's own."""

import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from torch.nn.functional import cross_entropy

from tests.foreign.mixture import mixture, points


class Lines(GeneralTracker):
    name, requires_logging_directory, tracker = "lines", False, None

    def __init__(self):
        super().__init__()
        self.logged = []

    def store_init_configuration(self, values):
        self.logged += values.values()

    def log(self, values, step=None):  # noqa: ARG002
        self.logged += values.values()


lines = Lines()
accelerator = Accelerator(log_with=lines)
accelerator.init_trackers("run", config={"lr": 1e-2})
model, loader = mixture(), points()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=6)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
for step, (x, y) in enumerate(loader):
    loss = cross_entropy(model(x), y)
    accelerator.backward(loss)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    accelerator.log({"loss": accelerator.gather(loss.detach()).mean().item()}, step=step)
accelerator.end_training()
results = lines.logged
