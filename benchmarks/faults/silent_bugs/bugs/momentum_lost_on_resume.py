"""A new optimizer has no moments, so none are loaded from the checkpoint and they start at zero.

https://github.com/KempnerInstitute/KempnerForge/pull/115
Expected: state lost on save.
"""

import torch
from small import batch, begin, dense
from torch import nn

accelerator, buggy = begin()
model = dense()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer = accelerator.prepare(model, optimizer)


def save_checkpoint(folder: str) -> None:
    if accelerator.is_main_process:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{folder}.pt")


def load_checkpoint(folder: str) -> None:
    state = torch.load(f"{folder}.pt")
    model.load_state_dict(state["model"])
    if buggy:  # only existing entries of the new optimizer are loaded
        state["optimizer"]["state"] = {}
    optimizer.load_state_dict(state["optimizer"])


for step in range(5):
    x, y = batch(step, accelerator)
    accelerator.backward(nn.functional.cross_entropy(model(x), y))
    optimizer.step()
    optimizer.zero_grad()
