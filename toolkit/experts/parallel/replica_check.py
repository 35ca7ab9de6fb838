"""Check that parameters and their gradients are equal on the ranks that have them when an optimizer steps, and only
there."""

from __future__ import annotations

from collections.abc import Collection
from itertools import compress
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.linalg import vector_norm
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from toolkit.errors import UserError
from toolkit.experts.compat import norm_of_each
from toolkit.experts.parallel.collectives import meet
from toolkit.experts.parallel.ownership import is_owned, is_shard, local_rows, ownership_of
from toolkit.experts.placement.placement import EMPTY_ROW

FIRST_STEPS, EVERY = 8, 64
"""The first steps, also after parameters were frozen or unfrozen, and every so many steps are checked: a check takes a
pass over weights and gradients, and a host sync."""


class ReplicaCheck:
    """An optimizer step hook that compares the norms of weights and gradients over all ranks that have them.

    A collective. Experts are compared over the expert data-parallel group, FSDP2 shards over the ranks with the same
    shard. Different gradients would let weights drift apart without an error: `torch.nn.utils.clip_grad_norm_` causes
    them, because its norm has the experts of one rank. Experts that became equal on all ranks of the EP group were
    averaged or broadcast by hand. Raises UserError, the same on every rank.

    Args:
        model: The model as it is called: in DDP or FSDP2.
        experts: Its owned parameters.
    """

    def __init__(self, model: nn.Module, experts: Collection[Tensor] = ()):
        self.model, self.steps = model, 0
        self._parameters = list(model.parameters())  # walking through the modules takes longer than the rest of a call
        self._trained, self._until = 0, FIRST_STEPS + 1
        self._originals: dict[str, nn.Parameter] = {}
        self._in_forwards: dict[nn.Parameter, tuple[Tensor, Tensor]] = {}
        """Greatest and least norm of each parameter in the forward passes of a step."""
        owned = set(experts)
        self._experts = {name: p for name, p in model.named_parameters() if p in owned}
        self._different = self._experts.keys() - self._equal_experts()[0]
        """Parameters of experts that once differed between ranks."""
        ownerships = filter(None, map(ownership_of, experts))
        self._ep_group = next((ownership.groups.ep_group for ownership in ownerships), None)
        self.is_evaluating = False
        """Whether the last forward pass had no gradients."""

    def watch_forwards(self, model: nn.Module) -> RemovableHandle:
        """Also compare the weights in forward passes with gradients of `model`, the model within DDP or FSDP2.

        They can be equal again when the optimizer steps: SAM perturbs weights by a norm of one rank's experts, and MAML
        calls the model with other weights. In the first forward pass without gradients, ranks that share experts wait
        for each other, because an evaluation on one rank would take the tokens of another rank's training step.
        """
        self._originals = dict(model.named_parameters())
        _CHECK_OF[model] = ref(self)
        return model.register_forward_pre_hook(_note_forward, prepend=True)  # before FSDP2 gathers shards

    def note_forward(self, model: nn.Module) -> None:
        """Measure the weights of a forward pass with gradients, or meet in the first one without."""
        was_evaluating, self.is_evaluating = self.is_evaluating, not torch.is_grad_enabled()
        if not self.is_evaluating:
            self.note_weights(model)
        elif not was_evaluating and self._ep_group is not None:
            meet("evaluation", self._ep_group)

    @torch.no_grad()
    def note_weights(self, model: nn.Module) -> None:
        """Measure the weights with which a forward pass of `model` begins, if the next step is checked."""
        if not self._is_due(self.steps + 1):
            return
        weights: dict[nn.Parameter, Tensor] = {}
        for name, weight in model.named_parameters():
            original = self._originals.get(name)
            if original is not None and original.requires_grad and _variants(original) is not None:
                weights[original] = local_rows(weight.detach())
        if not weights:
            return
        for parameter, norm in zip(weights, norm_of_each(list(weights.values())), strict=True):
            most, least = self._in_forwards.get(parameter, (norm, norm))
            self._in_forwards[parameter] = torch.maximum(most, norm), torch.minimum(least, norm)

    def _is_due(self, step: int) -> bool:
        return step < self._until or step % EVERY == 0

    def __call__(self, *_: Any) -> None:
        self.steps += 1
        if isinstance(self.model, DistributedDataParallel) and not self.model.require_backward_grad_sync:
            raise UserError(
                f"model: step {self.steps:,} is made within no_sync(), as by LocalSGD, so that replicas would drift "
                "apart. Step outside of it, without LocalSGD."
            )
        trained = sum(parameter.requires_grad for parameter in self._parameters)
        if trained != self._trained:
            self._trained, self._until = trained, self.steps + FIRST_STEPS
        if self._is_due(self.steps):
            self.check(self.steps)
            self._refuse_equal_experts()
        self._in_forwards.clear()

    @torch.no_grad()
    def check(self, step: int) -> None:
        """Compare weights, and the gradients that there are, after `step` steps. A collective."""
        compared: dict[str, nn.Parameter] = {}
        mine: list[int] = []
        labels: list[str] = []
        for name, parameter in self.model.named_parameters():
            if not parameter.requires_grad or (variants := _variants(parameter)) is None:
                continue
            compared[name] = parameter
            mine.append(len(labels) + variants.here)
            labels += [repr(name.removeprefix("module.")) + of for of in variants.labels]
        if not compared:
            return
        grads = {name: local_rows(p.grad) for name, p in compared.items() if p.grad is not None}
        norms = dict(zip(grads, norm_of_each(list(grads.values())), strict=True)) if grads else {}
        missing = torch.full((), -1.0, device=next(iter(compared.values())).device)
        weights = norm_of_each([local_rows(parameter.detach()) for parameter in compared.values()])
        gradients = [norms.get(name, missing) for name in compared]
        pairs = zip(compared.values(), weights, strict=True)
        most_N, least_N = zip(*(self._in_forwards.get(p, (norm, norm)) for p, norm in pairs), strict=True)
        all_norms = [norm.float() for norm in (*gradients, *weights, *most_N, *least_N)]
        norms_4N = torch.stack(all_norms).nan_to_num().view(4, -1)
        # One collective of all ranks, in which each leaves open what others have: all come to the same end.
        extremes = norms_4N.new_full((2, 4, len(labels)), -torch.inf)
        extremes[:, :, mine] = torch.stack([norms_4N, -norms_4N])
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
        most, least = extremes.cpu() * torch.tensor([1, -1]).view(2, 1, 1)
        of_all = [label for label, at in zip(compared, mine, strict=True) if least[0, at] < 0]
        unused = [name.removeprefix("module.") for name in of_all if not is_owned(compared[name])]
        model = self.model
        waits = isinstance(model, DistributedDataParallel) and not (model.find_unused_parameters or model.static_graph)
        if grads and unused and step == 1 and waits:
            raise UserError(
                f"model: {len(unused)} parameter(s), first {unused[0]!r}, got no gradient in the first step, and DDP "
                "waits for all. Make the Accelerator with kwargs_handlers=[DistributedDataParallelKwargs("
                "find_unused_parameters=True)], or freeze them."
            )
        # Ranks may each compute the weights of a forward pass, as in MAML, from outputs of experts rounded differently.
        apart_4L = most - least > torch.tensor([0, 0, 1e-6, 1e-6]).view(4, 1) * most
        for values, where, happens, apart in (
            ("gradients", "", "their weights would drift apart", apart_4L[0]),
            ("weights", "", "they drifted apart in an earlier step", apart_4L[1]),
            ("weights", "a forward pass of ", "experts got tokens of different models", apart_4L[2:].any(0)),
        ):
            different = [label for label, differ in zip(labels, apart.tolist(), strict=True) if differ]
            if different:
                raise UserError(
                    f"model: the {values} of {len(different)} parameter(s), first {different[0]}, differ between ranks "
                    f"in {where}step {step:,}, so {happens}. Call the model in DDP or FSDP2, clip with "
                    "accelerator.clip_grad_norm_ or ExpertSync.clip instead of torch.nn.utils, and change weights and "
                    "gradients alike on all ranks, in SAM by experts.global_norm."
                )

    @torch.no_grad()
    def _refuse_equal_experts(self) -> None:
        """Raise UserError if experts of all ranks have equal gradients, or equal weights that differed."""
        weights, gradients = self._equal_experts()
        for values, names in (("weights", weights & self._different), ("gradients", gradients)):
            if names:
                raise UserError(
                    f"model: the {values} of {len(names)} parameter(s) of experts, first "
                    f"{min(names).removeprefix('module.')!r}, are equal on ranks with different experts in step "
                    f"{self.steps:,}. Leave experts out when gradients or weights are averaged or broadcast by hand."
                )
        self._different |= self._experts.keys() - weights

    def _equal_experts(self) -> tuple[set[str], set[str]]:
        """Return the trained parameters of experts whose weights, and whose gradients, have the same norm on all ranks,
        and are not zero. A collective."""
        own = {name: p for name, p in self._experts.items() if p.requires_grad and _rows_differ(p)}
        if not own:
            return set(), set()
        zero = local_rows(next(iter(own.values()))).new_zeros((), dtype=torch.float64)
        values = [*own.values(), *(p.grad for p in own.values())]
        # Not sums, which rounding leaves of gradients behind a layer norm, and not in the precision of the values.
        norms = [zero if v is None else vector_norm(local_rows(v.detach()), dtype=torch.float64) for v in values]
        extremes = torch.stack([torch.stack(norms), -torch.stack(norms)]).nan_to_num()
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
        most, least = extremes.cpu() * torch.tensor([1, -1]).view(2, 1)
        weights, gradients = ((most == least) & (most != 0)).view(2, -1).tolist()
        return set(compress(own, weights)), set(compress(own, gradients))


def _rows_differ(parameter: nn.Parameter) -> bool:
    """Whether not all ranks of the EP group have the same rows of `parameter`, as replicas."""
    ownership = ownership_of(parameter)
    assert ownership is not None
    rows = ownership.rows_of_ranks
    return rows is None or len({frozenset(ids) - {EMPTY_ROW} for ids in rows}) > 1


_CHECK_OF: WeakKeyDictionary[nn.Module, ref[ReplicaCheck]] = WeakKeyDictionary()
"""Model -> the check of its forward passes. A copy of the model has the hook, and no check."""


def _note_forward(model: nn.Module, _: Any) -> None:
    if torch.compiler.is_compiling():  # a trace would depend on the number of the step
        return
    check = _CHECK_OF.get(model)
    if check is not None and (found := check()) is not None:
        found.note_forward(model)


class _Variants(NamedTuple):
    """The parts of one parameter that ranks have."""

    here: int
    """Index of this rank's part."""
    labels: list[str]
    """The name of each part, after the parameter's name."""


def _variants(parameter: nn.Parameter) -> _Variants | None:
    """Return the parts of `parameter`; None if no two ranks have the same."""
    ownership = ownership_of(parameter)
    here, labels = 0, [""]
    if ownership is not None and is_owned(parameter):
        groups = ownership.groups
        if groups.expert_dp_group is None:
            return None
        here, labels = groups.ep_rank, [f" of the experts of EP rank {rank}" for rank in range(groups.ep_size)]
    if is_shard(parameter):
        if len(parameter.placements) == 1 or not parameter.placements[0].is_replicate():
            return None
        mesh = parameter.device_mesh
        shards = mesh.size(1)
        here, labels = here * shards + mesh.get_local_rank(1), [label for label in labels for _ in range(shards)]
    return _Variants(here, labels)
