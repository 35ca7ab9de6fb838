"""Experts on torch alone: `torchrun --standalone --nproc-per-node 2 docs/examples/torch_alone.py FOLDER`."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from toolkit import experts

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
torch.manual_seed(0)
mixture = experts.make_moe(dim=16, hidden_dim=32, num_experts=8, top_k=2)
model = nn.Sequential(nn.Linear(16, 16), mixture, nn.Linear(16, 1))  # the same on every rank
stacks = experts.shard_experts(model, experts.make_expert_groups(dist.get_world_size()))  # each keeps its own experts
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
ddp = DistributedDataParallel(model)  # which leaves the experts alone
replanner = experts.Replanner(stacks, experts.ReplanOptions(planner="swap", every=10, guarded=False))
sync = experts.ExpertSync(ddp, optimizer, rebalance=replanner.after_step)


def train(first: int, last: int) -> float:
    for step in range(first, last + 1):
        x = torch.randn(64, 16, generator=torch.Generator().manual_seed(1000 * step + dist.get_rank()))
        loss = mse_loss(ddp(x), x.sum(-1, keepdim=True).sin())
        optimizer.zero_grad()
        loss.backward()
        sync.clip(model.parameters(), 1.0)
        optimizer.step()
        sync.after_step(step, optimizer)
    return loss.item()


train(1, 20)
experts.save(sys.argv[1], model, optimizer)
after_30 = train(21, 30)
experts.load(sys.argv[1], model, optimizer)  # under any number of ranks and any placement
print(f"rank {dist.get_rank()}: {len(replanner.migrations)} moves, loss {after_30:.6f}, again {train(21, 30):.6f}")
