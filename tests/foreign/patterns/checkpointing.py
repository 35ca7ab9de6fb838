"""`save_state` in the middle of an epoch; a new start from `load_state` skips the batches that were seen."""

import os

import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy

from tests.foreign.mixture import mixture, points


class Seen:
    """How many batches were trained on; `register_for_checkpointing` saves it."""

    batches = 0

    def state_dict(self):
        return {"batches": self.batches}

    def load_state_dict(self, state):
        self.batches = state["batches"]


accelerator, seen = Accelerator(), Seen()
accelerator.register_for_checkpointing(seen)
folder = os.path.join(os.environ["FOREIGN_FOLDER"], "step_3")


def start():
    model, loader = mixture(), points()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=6)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    return model, optimizer, loader, scheduler


def train(model, optimizer, batches, scheduler):
    found = []
    for step, (x, y) in enumerate(batches):
        loss = cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        seen.batches += 1
        found += [accelerator.gather(loss.detach()).mean(), scheduler.get_last_lr()[0]]
        if step == 2 and batches is loader:
            accelerator.save_state(folder)
    return found


model, optimizer, loader, scheduler = start()
whole = train(model, optimizer, loader, scheduler)
accelerator.free_memory()
model, optimizer, loader, scheduler = start()
accelerator.load_state(folder)
assert seen.batches == 3
again = train(model, optimizer, accelerator.skip_first_batches(loader, 3), scheduler)
assert again == whole[6:], (again, whole[6:])
results = whole + again
