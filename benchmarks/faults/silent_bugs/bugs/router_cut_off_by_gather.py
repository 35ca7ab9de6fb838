"""Router scores are gathered without a gradient, so only the penalty trains the router.

https://github.com/NVIDIA-NeMo/Automodel/pull/2995
Expected: wrong gradients.
"""

import torch
from small import Routed, batch, begin, gather_with_gradient
from torch import Tensor, nn

accelerator, buggy = begin()
rank, world = accelerator.process_index, accelerator.num_processes


class Gathered(Routed):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.router(x).softmax(-1)
        gathered = accelerator.gather(scores) if buggy and world > 1 else gather_with_gradient(scores, accelerator)
        return self.mix(gathered[rank * len(x) : (rank + 1) * len(x)], x), scores.square().sum(-1).mean()


model = Gathered()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer = accelerator.prepare(model, optimizer)
for step in range(5):
    x, y = batch(step, accelerator)
    output, penalty = model(x)
    accelerator.backward(nn.functional.cross_entropy(output, y) + 0.1 * penalty)
    optimizer.step()
    optimizer.zero_grad()
