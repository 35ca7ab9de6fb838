"""A plain Accelerate loop with expert parallelism for a custom MoE model, by the lines with `experts`.

ACCELERATE_USE_CPU=1 accelerate launch --config_file accelerate_configs/ddp_cpu.yaml docs/examples/plain_accelerate.py
"""

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from toolkit import ExpertParallel
from toolkit.experts import ReplanOptions


class Experts(nn.Module):
    def __init__(self, num_experts=8, dim=64, hidden=32):
        super().__init__()
        self.num_experts = num_experts
        self.up = nn.Parameter(torch.randn(num_experts, dim, hidden) * dim**-0.5)
        self.down = nn.Parameter(torch.randn(num_experts, hidden, dim) * hidden**-0.5)

    def forward(self, x, expert_ids, weights):
        y = torch.zeros_like(x)
        for expert in range(self.num_experts):
            token, choice = (expert_ids == expert).nonzero(as_tuple=True)
            out = (x[token] @ self.up[expert]).relu() @ self.down[expert]
            y = y.index_add(0, token, out * weights[token, choice, None])
        return y


class Mixture(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.stem, self.gate, self.head = nn.Linear(64, dim), nn.Linear(dim, 8, bias=False), nn.Linear(dim, 10)
        self.experts = Experts(dim=dim)

    def forward(self, x):
        x = self.stem(x).relu()
        weights, expert_ids = self.gate(x).softmax(-1).topk(2)
        return self.head(x + self.experts(x, expert_ids, weights))


torch.manual_seed(0)
digits = load_digits()
data = TensorDataset(torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target))
accelerator = Accelerator()
model = Mixture()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=10)
loader = DataLoader(data, batch_size=64, shuffle=True, drop_last=True)
replan = ReplanOptions(planner="swap", every=20, guarded=False)  # also without a gain
experts = ExpertParallel(accelerator, replan=replan)
model, optimizer, loader, scheduler = experts.prepare(model, optimizer, loader, scheduler)
for epoch in range(3):
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    accelerator.print(f"epoch {epoch + 1}  loss {loss.item():.3f}  {len(experts.migrations)} migrations")
accelerator.end_training()
