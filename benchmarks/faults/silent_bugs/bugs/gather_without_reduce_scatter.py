"""Inputs of all ranks are gathered for each rank's experts; their gradients are cut and not summed.

https://github.com/NVIDIA-NeMo/Automodel/pull/1260
Expected: wrong gradients.
"""

import torch
from small import batch, begin, gather_with_gradient, sum_over_ranks
from torch import Tensor, nn

accelerator, buggy = begin()
rank, world = accelerator.process_index, accelerator.num_processes


class Spread(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(8, 16), nn.Linear(16, 3)
        self.inner = nn.Parameter(torch.randn(16, 16) / 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.stem(x).relu()
        gathered = gather_with_gradient(hidden, accelerator)
        if buggy:  # its own part is all that the backward looks at
            mine = torch.arange(len(gathered))[:, None] // len(x) == rank
            gathered = torch.where(mine, gathered, gathered.detach())
        share = torch.arange(16).chunk(world)[rank]
        units = (gathered @ self.inner[:, share]).tanh()
        spread = torch.zeros(len(units), 16).index_copy(1, share, units)
        return self.head(sum_over_ranks(spread)[rank * len(x) : (rank + 1) * len(x)])


model = Spread()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer = accelerator.prepare(model, optimizer)
for step in range(5):
    x, y = batch(step, accelerator)
    accelerator.backward(nn.functional.cross_entropy(model(x), y))
    optimizer.step()
    optimizer.zero_grad()
