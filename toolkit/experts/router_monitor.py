"""Monitor of a model's routers, with or without expert parallelism: load, auxiliary loss, and trained experts.

The gradient of an auxiliary loss is separated from the gradient of the other losses at the router's output: the losses
read a view of its scores, and the hook of the view gets only their gradient.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ref

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from toolkit.errors import require, require_type
from toolkit.experts.expert_records import ExpertRecords
from toolkit.experts.layer.losses import balance_weight_of
from toolkit.experts.layer.model_inputs import balance_coefficient, counted_tokens, own_balance_loss, watch_inputs
from toolkit.experts.layer.moe_layer import Experts
from toolkit.experts.layer.recompute import in_reentrant_forward, recomputing
from toolkit.experts.layer.router import Routing
from toolkit.experts.layer.routing_log import Choices, RoutedForward, RowBytes
from toolkit.experts.layer.stack import ExpertStack
from toolkit.experts.moving.replan import Replanner
from toolkit.experts.parallel.collectives import extremes_over_ranks, is_main, sum_over_ranks
from toolkit.experts.parallel.groups import ExpertGroups
from toolkit.experts.placement.loads import Ints
from toolkit.experts.placement.placement import EMPTY_ROW, initial_placement
from toolkit.experts.sharding.find import find_experts, router_candidates
from toolkit.experts.sharding.found import FoundMoE
from toolkit.experts.sharding.router_replay import hook_blocks

if TYPE_CHECKING:
    from jaxtyping import Float, Int

FEW = 20
"""Mean (token, expert) pairs per expert below which an expert without tokens is not reported."""
MOST_NAMED = 10
"""Maximum layers or experts in a sentence."""


class RouterMonitor:
    """Measures the routers of an MoE model, sharded or not, and reports faults in sentences.

    Ordinary steps only count on the device. In the first step after each reading, the gradients of routers and experts
    are measured as well. Training does not change. Make the monitor after adapters were added and experts sharded, and
    before the model is compiled.

    Args:
        model: A model of transformers with MoE layers, with layers of `make_moe`, or after `shard_experts`.
        replanner: Rebalances the experts, in a loop on torch. Default: none does.

    Raises:
        UserError: The model has no experts.

    Example:
        >>> monitor = RouterMonitor(model)
        >>> records = []
        >>> for step, batch in enumerate(loader, start=1):
        ...     model(**batch).loss.backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        ...     if step % 50 == 0:
        ...         records.append({"step": step, **monitor.metrics()})
        >>> if rank == 0:
        ...     tk.save_expert_figures("figures", records)
    """

    def __init__(self, model: nn.Module, replanner: Replanner | None = None):
        require_type("model", model, nn.Module, "Pass the model that is trained")
        self.model: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
        found = find_experts(self.model)
        require(bool(found), "model", type(self.model).__name__, "has no experts, take an MoE model")
        watch_inputs(self.model)
        self.steps, self.measures = 0, True
        """Optimizer steps of the model so far, and whether the next one measures gradients."""
        self.findings: list[str] = []
        """Findings of the last reading, in sentences. Each is printed once, on rank 0."""
        self._told: set[str] = set()
        self._undo = ExitStack()
        routers = router_candidates(self.model)
        self._layers = [_Layer(self, each, routers.get(name, []), self._undo) for name, each in found.items()]
        stacks = {layer.found.name: layer.stack for layer in self._layers}
        modules = {layer.found.name: layer.found.module for layer in self._layers}
        self._records = ExpertRecords(Experts(stacks, modules), replanner)
        self._parameters = set(self.model.parameters())
        # By a weak reference, lest the hook of all optimizers keep the model alive.
        hook = register_optimizer_step_pre_hook(partial(_note_step, ref(self)))
        self._undo.callback(hook.remove)

    def close(self) -> None:
        """Remove all hooks."""
        self._undo.close()

    def note_step(self, optimizer: Optimizer) -> None:
        """Count a step that `optimizer` is about to make, and measure its gradients if they are due."""
        if any(p in self._parameters for group in optimizer.param_groups for p in group["params"][:1]):
            self.steps += 1
            self._records.fold_when_many()
            for layer in self._layers if self.measures else ():
                layer.measure_trained()
            self.measures = False

    def metrics(self) -> dict[str, Any]:
        """Return load, auxiliary loss and trained experts over all ranks since the last call. A collective.

        `docs/reference/metrics.md` explains the names. Findings are printed once, and are in `findings`.

        Returns:
            Numbers, and a list for each layer; empty without training forward passes, except that the first call has
            the placement of sharded experts.

        Example:
            >>> monitor.metrics()["moe/experts_without_tokens"]
            0
        """
        self._records.fold()
        load_LE, steps = self._records.window.load_LE, self.steps - self._records.began
        values = self._records.read(self.steps)
        self.findings = []
        if load_LE.any():
            values |= self._read_loads(load_LE, steps)
            values |= {} if self.measures else self._read_gradients()
            self.measures = True
        # A window's number of steps does not make a finding new.
        new = {sentence.partition(" tokens in ")[0]: sentence for sentence in self.findings}
        if is_main():
            sys.stdout.write("".join(f"{text}\n" for finding, text in new.items() if finding not in self._told))
        self._told |= new.keys()
        return values

    def _read_loads(self, load_LE: Ints, steps: int) -> dict[str, Any]:
        without = 0
        for name, load_E, active_E in zip(self._records.names, load_LE, self._records.forwards.active(), strict=True):
            idle = np.flatnonzero((load_E == 0) & active_E & load_E.any()).tolist()
            without += len(idle)
            if idle and load_E.sum() >= FEW * active_E.sum():
                self.findings.append(f"{name}: {_listed('expert', idle)} got no tokens in {steps} steps.")
        return {"moe/experts_without_tokens": without}

    def _read_gradients(self) -> dict[str, Any]:
        names, layers = self._records.names, self._layers
        auxiliary, others = sum_over_ranks(torch.stack([layer.norms() for layer in layers]).sum(0)).tolist()
        if not auxiliary and (reason := self._reason_of_no_loss(is_measured=others > 0)):
            self.findings.append(f"the auxiliary loss does not act: {reason}.")
        shares, _ = extremes_over_ranks(torch.cat([layer.trained_E for layer in layers]))
        trained = dict(zip(names, shares.split([layer.found.num_experts for layer in layers]), strict=True))
        if without := [name for name, share_E in trained.items() if not share_E.any()]:
            where = "" if len(without) == len(layers) else f" in {_listed('layer', without)}"
            reason = "no adapter targets them" if hasattr(self.model, "peft_config") else "they are frozen or unused"
            self.findings.append(f"expert weights get no gradient{where}: {reason}.")
        return {
            "moe/untrained_experts": int((shares == 0).sum()),
            **({"moe/aux_gradient_ratio": auxiliary / others} if others else {}),
            **{f"moe/trained/{name}": share_E.tolist() for name, share_E in trained.items()},
        }

    def _reason_of_no_loss(self, *, is_measured: bool) -> str | None:
        """Return why no loss of router scores acts; None if no setting asks for one, or it is not known."""
        routers = [layer.router for layer in self._layers if layer.returns_scores]
        penalty = balance_weight_of(self.model.modules())
        name, coefficient = balance_coefficient(self.model)
        reasons = (
            (not routers or not (name or penalty), None),
            (not any(router.weight.requires_grad for router in routers), "the routers are frozen"),
            (not penalty and not coefficient, f"its coefficient is 0 ({name})"),
            (
                not penalty and own_balance_loss(self.model) is None,
                "router logits are not returned (output_router_logits=False)",
            ),
            (is_measured, "none of its gradient reaches the routers"),
            (True, None),
        )
        return next(reason for holds, reason in reasons if holds)


def _note_step(monitor: ref[RouterMonitor], optimizer: Optimizer, *_: Any) -> None:
    if (found := monitor()) is not None:
        found.note_step(optimizer)


class _Layer:
    """Counts and gradients of one layer with experts."""

    def __init__(self, monitor: RouterMonitor, found: Any, candidates: list[Any], undo: ExitStack):
        self.monitor, self.found = monitor, found
        self.router = candidates[0] if len(candidates) == 1 else found.router
        self.returns_scores = False
        """Whether the router returns its scores, so that gradients of losses can be told apart."""
        self.trained_E = torch.zeros(found.num_experts)
        """Share of each expert's numbers in parameters with a gradient, in the last measured step."""
        self._hooked = self.of_scores = torch.zeros(())
        """Sums of the gradients that the hook of the router's weight got, and of the part of losses of scores."""
        if isinstance(found, FoundMoE) or found.is_sharded:
            self.stack = found.stack
        else:  # a stack without parameters, for its log
            self.stack = ExpertStack({}, initial_placement(found.num_experts, 1), ExpertGroups())
            if found.known is None:
                undo.callback(found.module.register_forward_pre_hook(self._count, with_kwargs=True).remove)
            else:  # not called with ids
                records: list[Any] = hook_blocks(monitor.model, {found.name: found})[found.name].records
                records.append(self)
                undo.callback(records.remove, self)
        if self.router is not None:
            # Before all other hooks of the router, which then see the view.
            undo.callback(self.router.register_forward_hook(self._split, prepend=True).remove)
            if self.router.weight.requires_grad:
                undo.callback(self.router.weight.register_hook(self._add).remove)

    def _count(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = (each for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
        self.append(next(each for each in tensors if not each.is_floating_point()))

    def append(self, ids_TK: Int[Tensor, "T K"]) -> None:
        """Count the experts of a forward pass, if it is for training."""
        if not recomputing() and (torch.is_grad_enabled() or in_reentrant_forward()):
            load_E = Choices(ids_TK.long(), counted_tokens(len(ids_TK))).load(self.found.num_experts)
            self.stack.log.add(RoutedForward(self.stack.placement, load_E, None, None, None, RowBytes(0, 0), None))

    def _split(self, _router: nn.Module, _args: Any, output: Any) -> Any:
        """Give losses views of the scores."""
        if isinstance(output, Routing):
            return replace(output, probs_TE=self._view(output.probs_TE), logits_TE=self._view(output.logits_TE))
        if isinstance(output, tuple) and len(output) == 3:
            return self._view(output[0]), *output[1:]
        return None

    def _view(self, scores_TE: Float[Tensor, "T E"]) -> Float[Tensor, "T E"]:
        self.returns_scores = True
        weight, measures = self.router.weight, self.monitor.measures and not torch.compiler.is_compiling()
        if not (measures and scores_TE.requires_grad and weight.requires_grad) or recomputing():
            return scores_TE
        view_TE = scores_TE.view_as(scores_TE)
        # By a weak reference, because Python does not collect cycles through a graph.
        view_TE.register_hook(partial(_add_of_scores, ref(self), scores_TE, weight))
        return view_TE

    def _add(self, grad: Tensor) -> None:
        if self.monitor.measures:
            self._hooked = self._hooked + grad

    def norms(self) -> Float[Tensor, " 2"]:
        """Return the gradient norms of the router's weight in the measured step: losses of its scores, and others."""
        # The hook got the gradient of losses of scores twice: by itself, and in the whole gradient.
        norms_2 = torch.stack([self.of_scores.norm(), (self._hooked - 2 * self.of_scores).norm()])
        # FSDP2 does not call the hook of its shards.
        known_2 = norms_2 if self._hooked.ndim else torch.zeros(2)
        self._hooked = self.of_scores = torch.zeros(())
        return known_2.to(self.trained_E)

    @torch.no_grad()
    def measure_trained(self) -> None:
        """Set the share of each expert that has gradients, without a host sync."""
        experts = self.stack.placement.slots[self.stack.groups.ep_rank]
        held = [slot for slot, expert in enumerate(experts) if expert != EMPTY_ROW]
        parameters = self.found.parameters().values()
        trained_E = torch.zeros(self.found.num_experts, device=self.stack.log.load_E.device)
        for parameter, form in parameters:
            if parameter.requires_grad and parameter.grad is not None:
                grad = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
                has_grad_S = self.found.rows(grad, form).flatten(1).any(1).to(trained_E)
                trained_E[[experts[slot] for slot in held]] += parameter.numel() // len(experts) * has_grad_S[held]
        self.trained_E = trained_E * len(experts) / sum(parameter.numel() for parameter, _ in parameters)


def _add_of_scores(
    layer: ref[_Layer], scores_TE: Float[Tensor, "T E"], weight: Tensor, grad_TE: Float[Tensor, "T E"]
) -> None:
    if (found := layer()) is not None:
        found.of_scores = found.of_scores + torch.autograd.grad(scores_TE, weight, grad_TE, retain_graph=True)[0]


def _listed(noun: str, items: list[Any]) -> str:
    """Return `experts 5, 9`, with the number of further items if there are many."""
    more = f" and {len(items) - MOST_NAMED} more" if len(items) > MOST_NAMED else ""
    return f"{noun}{'s' if len(items) > 1 else ''} {', '.join(map(str, items[:MOST_NAMED]))}{more}"
