"""Whether replicated parameters and their gradients are the same on all ranks when an optimizer steps."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from toolkit.compat import norm_of_each
from toolkit.errors import UserError
from toolkit.experts.parallel.groups import extremes_over_ranks
from toolkit.experts.parallel.ownership import is_owned, local_rows

FIRST_STEPS, EVERY = 8, 64
"""Checked are the first steps, the first after more or fewer parameters are trained, and every so many: it costs a pass
over weights and gradients, and a host sync."""


class ReplicaCheck:
    """An optimizer's step hook, which compares the norms of replicated weights and gradients over all ranks that have
    them. A collective. Of parameters that FSDP2 shards, these are the ranks with the same shard, if there are several.

    Where gradients differ, weights would drift apart without an error, and where weights differ they have, between two
    checks. One reason is `torch.nn.utils.clip_grad_norm_`, whose norm has the experts of one rank. Raises UserError,
    the same on every rank.
    """

    def __init__(self, model: nn.Module):
        self.model, self.steps = model, 0
        self._parameters = list(model.parameters())  # walking through the modules takes longer than the rest of a call
        self._trained, self._until = 0, 0

    def __call__(self, *_: Any) -> None:
        self.steps += 1
        if isinstance(self.model, DistributedDataParallel) and not self.model.require_backward_grad_sync:
            raise UserError(
                f"step {self.steps:,} is made within model.no_sync(), as by LocalSGD, so replicated parameters would "
                "drift apart and experts be averaged with others: step outside of it, without LocalSGD."
            )
        trained = sum(parameter.requires_grad for parameter in self._parameters)
        if trained != self._trained:
            self._trained, self._until = trained, self.steps + FIRST_STEPS
        if self.steps < self._until or self.steps % EVERY == 0:
            self.check()

    @torch.no_grad()
    def check(self) -> None:
        replicated: dict[str, nn.Parameter] = {}
        group = None
        for name, parameter in self.model.named_parameters():
            if not parameter.requires_grad or is_owned(parameter):
                continue
            if isinstance(parameter, DTensor):
                if len(parameter.placements) == 1 or not parameter.placements[0].is_replicate():
                    continue
                group = parameter.device_mesh.get_group(0)
            replicated[name] = parameter
        if not replicated:
            return
        grads = {name: local_rows(p.grad) for name, p in replicated.items() if p.grad is not None}
        norms = dict(zip(grads, norm_of_each(list(grads.values())), strict=True)) if grads else {}
        missing = torch.full((), -1.0, device=next(iter(replicated.values())).device)
        weights = norm_of_each([local_rows(parameter.detach()) for parameter in replicated.values()])
        gradients = [norms.get(name, missing) for name in replicated]
        mine = torch.stack([norm.float() for norm in (*gradients, *weights)]).nan_to_num()
        most, least = extremes_over_ranks(mine, group)
        apart = (most != least).int()
        if group is not None:
            dist.all_reduce(apart)  # ranks with other shards must come to the same end
        least = least.cpu()[: len(replicated)]
        names = [name.removeprefix("module.") for name in replicated]
        unused = [name for name, value in zip(names, least.tolist(), strict=True) if value < 0]
        if unused and self.steps == 1 and _waits_for_all(self.model):
            raise UserError(
                f"{len(unused)} parameter(s), first {unused[0]!r}, got no gradient in the first step, and DDP waits "
                "for all: make the Accelerator with kwargs_handlers=[DistributedDataParallelKwargs("
                "find_unused_parameters=True)] of accelerate, or freeze them."
            )
        of_gradients, of_weights = apart.split(len(replicated))
        for values, happens, ranks in (
            ("gradients", "their weights would drift apart", of_gradients),
            ("weights", "they drifted apart in an earlier step", of_weights),
        ):
            different = [name for name, differ in zip(names, ranks.tolist(), strict=True) if differ]
            if different:
                raise UserError(
                    f"step {self.steps:,}: the {values} of {len(different)} replicated parameter(s), first "
                    f"{different[0]!r}, differ between ranks, so {happens}: call the model that prepare returned, clip "
                    "with accelerator.clip_grad_norm_, because torch.nn.utils.clip_grad_norm_ knows the experts of one "
                    "rank only, and change weights and gradients alike on all ranks."
                )


def _waits_for_all(model: nn.Module) -> bool:
    return isinstance(model, DistributedDataParallel) and not (model.find_unused_parameters or model.static_graph)
