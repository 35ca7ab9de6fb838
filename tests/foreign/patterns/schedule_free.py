"""An optimizer without a schedule, which steps in its training mode alone and averages weights for evaluation."""

import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy

from tests.foreign.mixture import mixture, points


class ScheduleFreeSGD(torch.optim.Optimizer):
    """Weights are beta * x + (1 - beta) * z in training and x in evaluation (Defazio et al. 2024, arXiv 2405.15682)."""

    def __init__(self, parameters, lr, beta=0.9):
        super().__init__(parameters, {"lr": lr, "beta": beta, "steps": 0, "trains": False})

    def train(self):
        self._turn(trains=True)

    def eval(self):
        self._turn(trains=False)

    @torch.no_grad()
    def _turn(self, trains):
        for group in self.param_groups:
            if group["trains"] != trains:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], 1 - group["beta"] if trains else 1 - 1 / group["beta"])
                group["trains"] = trains

    @torch.no_grad()
    def step(self, closure=None):  # noqa: ARG002
        for group in self.param_groups:
            if not group["trains"]:
                raise RuntimeError("call train() before a step")
            group["steps"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    z = self.state[p].setdefault("z", p.detach().clone())
                    x = p.lerp(z, 1 - 1 / group["beta"])
                    z.sub_(p.grad, alpha=group["lr"])
                    p.copy_(x.lerp_(z, 1 / group["steps"]).lerp_(z, 1 - group["beta"]))


accelerator = Accelerator()
model, loader = mixture(), points()
optimizer = ScheduleFreeSGD(model.parameters(), lr=0.5)
scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
results = []
optimizer.train()
for x, y in loader:
    loss = cross_entropy(model(x), y)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    results.append(accelerator.gather(loss.detach()).mean())
optimizer.eval()
with torch.no_grad():
    results += [accelerator.gather(cross_entropy(model(x), y)).mean() for x, y in loader]
