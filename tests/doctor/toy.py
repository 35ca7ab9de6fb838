"""A small training script with faults to switch on: python toy.py [FAULT].

Two of four experts have replicas on two ranks, experts migrate after the second step, and the MoE layer is recomputed
in the backward pass.
"""

import sys
import time

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from toolkit import experts
from toolkit.experts.layer import losses
from toolkit.experts.layer.recompute import checkpoint
from toolkit.experts.moving.migrate import migrate
from toolkit.experts.parallel.gradient_average import GradientAverage
from toolkit.experts.parallel.ownership import owned
from toolkit.experts.parallel.replicas import refresh_replicas
from toolkit.experts.parallel.sync import clip_gradients
from toolkit.experts.state import checkpoint_files
from toolkit.integrations.accelerate.prepare import prepare

fault = sys.argv[1] if len(sys.argv) > 1 else ""
accelerator = Accelerator()
rank, world = accelerator.process_index, accelerator.num_processes
set_seed({"seed": world, "time": time.time_ns() % 2**32}.get(fault, 0))
BEFORE, AFTER = experts.ExpertPlacement(((0, 1, 2), (3, 0, -1))), experts.ExpertPlacement(((3, 1, 2), (0, 3, -1)))


class LateNorm(nn.LayerNorm):
    """Differs between ranks from the second step on."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + 0.1 * rank * (step > 0))


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        groups = experts.make_expert_groups(world)
        self.stem, self.head = nn.Linear(8, 16), nn.Linear(16, 3)
        self.norm = {"batch_norm": nn.BatchNorm1d, "late_norm": LateNorm}.get(fault, nn.LayerNorm)(16)
        self.moe = experts.make_moe(16, 12, 4, 2, groups=groups, placement=BEFORE if world == 2 else "contiguous")
        if fault == "buffer":
            self.register_buffer("seen", torch.zeros(()))
        else:
            self.seen = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += x.sum()
        hidden = self.norm(self.stem(x)).relu()
        if fault == "recompute":
            return self.head(hidden + torch_checkpoint(self.moe, hidden, use_reentrant=False))
        return self.head(hidden + checkpoint(self.moe, hidden))


model = Toy()
stack = model.moe.expert_stack
trained = [p for name, p in model.named_parameters() if fault != "optimizer" or name != "head.weight"]
optimizer = torch.optim.AdamW(trained, lr=1e-2 * (world if fault == "rate" else 1))
penalty = experts.RouterPenalty(model, balance_weight=0.1)
frozen = [model.head.weight, *stack.parameters.values()] if fault == "unfreeze" else []
for parameter in frozen:
    parameter.requires_grad_(False)
if fault == "unsynchronised":
    ignored = ["head.weight", "moe.experts.up", "moe.experts.down"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model = lambda *_: None
wrapped, optimizer = prepare(accelerator, model, optimizer)
owned_parameters = owned(model.parameters())

if fault == "balance":
    losses.global_load = lambda layers: torch.stack([layer.last_load_E for layer in layers])
if fault in ("permutation", "late_permutation") and world > 1:
    send_back = stack.dispatcher.send_back
    stack.dispatcher.send_back = lambda rows, dispatched: send_back(
        rows.flip(0) if step or fault == "permutation" else rows, dispatched
    )
if fault == "temperature":
    model.moe.router.masked = lambda logits, _: logits / logits.detach().max()
if fault == "capacity":
    model.moe.router.masked = lambda logits, _: logits.masked_fill(
        (best := nn.functional.one_hot(logits.argmax(-1), 4)) * best.cumsum(0) > len(logits) / 4, -torch.inf
    )
if fault == "recompute":
    route, calls = model.moe.router.forward, [0]

    def reroute(x: torch.Tensor):
        calls[0] += 1
        routing = route(x)
        if calls[0] % 2 == 0:  # swaps experts 1 and 2, which are on the same rank
            routing.expert_ids_TK.copy_(torch.tensor([0, 2, 1, 3])[routing.expert_ids_TK])
        return routing

    model.moe.router.forward = reroute
if fault == "save":  # Accelerate saves the layer as any other layer
    model.moe._state_dict_pre_hooks.clear()
else:

    def save_checkpoint(folder: str) -> None:
        checkpoint_files.save(folder, model, optimizer)

    def load_checkpoint(folder: str) -> None:
        checkpoint_files.load(folder, model, optimizer)


for step in range(10):
    if fault == "skip" and rank == 1 and step == 1:
        continue
    order = torch.Generator().manual_seed(step + (rank if fault == "order" else 0))
    x = torch.randn(12, 8, generator=order)
    y = torch.randint(3, (12,), generator=order)
    mine = slice(rank * 12 // world, (rank + 1) * 12 // world)
    if fault == "mean" and world == 2:  # a mean of the means of seven and five samples
        mine = slice(0, 7) if rank == 0 else slice(7, 12)
    loss = nn.functional.cross_entropy(wrapped(x[mine]), y[mine]) + penalty()
    accelerator.backward(loss)
    GradientAverage(owned_parameters).finish()  # without the checks of ExpertSync
    for parameter in owned_parameters if fault in ("sum", "twice") else ():
        parameter.grad *= world if fault == "sum" else 1 / world
    clip_gradients(list(model.parameters()), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    if fault != "refresh":
        refresh_replicas(owned_parameters)
    for parameter in frozen:
        parameter.requires_grad_(True)
    if step == 1 and world == 2:
        if fault == "dropped":
            stack.place(AFTER)
        else:
            migrate(stack, AFTER, None if fault == "stale" else optimizer)
