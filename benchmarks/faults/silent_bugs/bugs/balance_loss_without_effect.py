"""The function that injects the balance loss into the backward pass returns a tensor that is not used.

https://github.com/NVIDIA-NeMo/Automodel/issues/1408
Expected: balance loss without effect.
"""

import torch
from small import Output, Routed, balance_loss, batch, begin
from torch import Tensor, nn

accelerator, buggy = begin()


class Inject(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: object, value: Tensor, _loss: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(_ctx: object, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, torch.full((), 0.1)


class Balanced(Routed):
    def forward(self, x: Tensor) -> Output:
        probabilities = self.router(x).softmax(-1)
        loss = balance_loss(probabilities, accelerator)
        injected = Inject.apply(probabilities, loss)
        return Output(self.mix(probabilities if buggy else injected, x), loss)


model = Balanced()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer = accelerator.prepare(model, optimizer)
for step in range(5):
    x, y = batch(step, accelerator)
    accelerator.backward(nn.functional.cross_entropy(model(x).logits, y))
    optimizer.step()
    optimizer.zero_grad()
