"""`save_state` in the middle of an epoch, and `load_state` with the remaining batches."""

import os

from accelerate import Accelerator
from torch.nn.functional import cross_entropy

from tests.foreign.toy import build


class Seen:
    """Number of batches, saved by `register_for_checkpointing`."""

    batches = 0

    def state_dict(self):
        return {"batches": self.batches}

    def load_state_dict(self, state):
        self.batches = state["batches"]


accelerator, seen = Accelerator(), Seen()
accelerator.register_for_checkpointing(seen)
folder = os.path.join(os.environ["FOREIGN_FOLDER"], "step_3")
results = []
for resumed in (False, True):
    model, optimizer, loader, scheduler = build()
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    batches = loader
    if resumed:
        accelerator.load_state(folder)
        assert seen.batches == 3
        batches = accelerator.skip_first_batches(loader, 3)
    for step, (x, y) in enumerate(batches):
        loss = cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        seen.batches += 1
        results += [accelerator.gather(loss.detach()).mean(), scheduler.get_last_lr()[0]]
        if step == 2 and not resumed:
            accelerator.save_state(folder)
    accelerator.free_memory()
assert results[12:] == results[6:12]
