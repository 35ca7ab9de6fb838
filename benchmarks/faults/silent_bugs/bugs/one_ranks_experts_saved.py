"""All ranks save their experts under the same names, so all ranks load the experts of one rank.

https://github.com/KempnerInstitute/KempnerForge/issues/202
Expected: expert lost on save.
"""

import torch
from small import MoEModel, batch, begin
from torch import nn

from toolkit.experts.parallel.gradient_average import GradientAverage
from toolkit.experts.parallel.ownership import owned
from toolkit.integrations.accelerate.prepare import prepare

accelerator, buggy = begin()
rank, world = accelerator.process_index, accelerator.num_processes
model = MoEModel(accelerator.num_processes)
optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
wrapped, optimizer = prepare(accelerator, model, optimizer)
experts = owned(model.parameters())


def save_checkpoint(folder: str) -> None:
    if rank == 0 or not buggy:
        weights = {name: weight.detach() for name, weight in model.state_dict(keep_vars=True).items()}
        torch.save({"model": weights, "optimizer": optimizer.state_dict()}, f"{folder}-{rank}.pt")


def load_checkpoint(folder: str) -> None:
    state = torch.load(f"{folder}-{0 if buggy else rank}.pt")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


for step in range(5):
    x, y = batch(step, accelerator)
    accelerator.backward(nn.functional.cross_entropy(wrapped(x), y))
    GradientAverage(experts).finish()
    optimizer.step()
    optimizer.zero_grad()
