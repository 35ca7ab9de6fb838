"""DDP overwrites running statistics of all ranks except rank 0 before each forward pass.

https://github.com/pytorch/pytorch/issues/1051
Expected: buffer overwritten by broadcast.
"""

import torch
from small import batch, begin, dense
from torch import Tensor, nn

accelerator, buggy = begin()


class Scaled(nn.Module):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = dense()
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen += x.sum(0) if buggy else accelerator.reduce(x.sum(0))
        return self.layers(x)


model = Scaled()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer = accelerator.prepare(model, optimizer)
for step in range(5):
    x, y = batch(step, accelerator)
    accelerator.backward(nn.functional.cross_entropy(model(x), y))
    optimizer.step()
    optimizer.zero_grad()
