"""Expert loads are summed over ranks, but probabilities are not: the loss shrinks with the world size.

https://github.com/NVIDIA/Megatron-LM/issues/3672
Expected: rank-local balance loss.
"""

import torch
from small import Output, Routed, batch, begin, sum_over_ranks
from torch import Tensor, nn

accelerator, buggy = begin()
rank, world = accelerator.process_index, accelerator.num_processes


class Balanced(Routed):
    def forward(self, x: Tensor) -> Output:
        probabilities = self.router(x).softmax(-1)
        load, total = nn.functional.one_hot(probabilities.argmax(-1), 4).float().sum(0), probabilities.sum(0)
        load, total = sum_over_ranks(load), total if buggy else sum_over_ranks(total)
        return Output(self.mix(probabilities, x), 4 * (load * total).sum() / (len(x) * world) ** 2)


model = Balanced()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer = accelerator.prepare(model, optimizer)
for step in range(5):
    x, y = batch(step, accelerator)
    output = model(x)
    accelerator.backward(nn.functional.cross_entropy(output.logits, y) + 0.1 * output.aux_loss)
    optimizer.step()
    optimizer.zero_grad()
