"""Router losses over the global batch: the auxiliary load-balancing loss, and the router z-loss.

The balance loss is not linear in the batch: the mean of rank-local losses is another loss, which pushes each rank
towards balance on its own few tokens. So the fractions come from the tokens of all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol
from weakref import WeakSet, ref

from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from toolkit.errors import UserError
from toolkit.experts.layer.moe_layer import moe_layers
from toolkit.experts.layer.router import Routing
from toolkit.experts.parallel.collectives import sum_over_ranks, world_size

if TYPE_CHECKING:
    from jaxtyping import Float, Int

TWO_BALANCE_LOSSES = (
    "the model adds its own aux_loss to the loss (output_router_logits=True), and RouterPenalty a second balance loss: "
    "set model.config.output_router_logits = False (in TRL router_aux_loss_coef=0.0), or leave RouterPenalty out."
)


class RoutingReport(Protocol):
    """Routing of the last forward pass: an `MoE`, or a `RouterWatch` of a transformers model."""

    @property
    def routing(self) -> Routing | None:
        """Return None before the first forward."""
        ...

    @property
    def last_load_E(self) -> Int[Tensor, " E"]:
        """int64: this rank's assignments per expert."""
        ...

    @property
    def num_choices(self) -> Tensor | int:
        """How many experts can be chosen."""
        ...


_penalties: WeakSet[RouterPenalty] = WeakSet()
"""All there are, for `balance_weight_of`."""


def balance_weight_of(modules: Iterable[nn.Module]) -> float:
    """The largest weight that a `RouterPenalty` gives the balance of a router or `MoE` among `modules`; 0 for none."""
    return max((penalty.balance_weight for penalty in penalties_of(modules)), default=0.0)


def penalties_of(modules: Iterable[nn.Module]) -> list[RouterPenalty]:
    """Return each `RouterPenalty` of a router or `MoE` among `modules`."""
    ids = {id(module) for module in modules}
    return [each for each in _penalties if any(id(getattr(r, "module", r)) in ids for r in each.layers)]


def load_balancing_share(
    probs_TE: Float[Tensor, "T E"],
    fraction_E: Float[Tensor, " E"],
    num_tokens: Tensor | int,
    num_experts: Tensor | int,
) -> Float[Tensor, ""]:
    """Return this rank's share of E * sum_e f_e * P_e (Fedus et al. 2021, arXiv 2101.03961, eq. 4); 1 when balanced.

    f_e is the fraction of all ranks' pairs that went to expert e, and P_e the mean probability of e over all ranks'
    `num_tokens` tokens. Only P has a gradient. The shares of the ranks add up to the loss. E is `num_experts`, the
    active ones.
    """
    return num_experts * (fraction_E.to(probs_TE.dtype) * probs_TE.sum(0)).sum() / num_tokens


def without_padding(routing: Routing, values: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """`values` with zeros for the tokens that are padding."""
    mask_T = routing.counted_T
    return values if mask_T is None else values * mask_T.view(-1, *[1] * (values.ndim - 1))


def z_loss_share(routing: Routing, num_tokens: Tensor | int) -> Float[Tensor, ""]:
    """This rank's share of the mean of logsumexp(logits)^2 (Zoph et al. 2022, arXiv 2202.08906, eq. 5)."""
    return without_padding(routing, routing.logits_TE.logsumexp(-1).square()).sum() / num_tokens


class RouterPenalty:
    """Router losses of all MoE layers after a forward pass, as one penalty for `toolkit.train.task.Loss`.

    Sums over layers of `balance_weight` * balance loss + `z_weight` * z-loss, divided by the number of layers.
    One small reduction over ranks serves all layers. Layers that the last forward pass skipped, on all ranks, are left
    out: their routing has been through a backward pass. `routers` is a model with `MoE` layers, or the reports of
    another model:

        penalty = RouterPenalty(watch_routers(model), balance_weight=0.01)    # of transformers, before it is wrapped
        loss = model(**batch).loss + penalty()

    The balance loss covers the tokens of all ranks (and of the full step, with `WholeStepBalance`), so it does not
    depend on the world size.
    """

    def __init__(
        self,
        routers: nn.Module | Sequence[RoutingReport],
        *,
        balance_weight: float,
        z_weight: float = 0.0,
    ):
        found = moe_layers(routers).values() if isinstance(routers, nn.Module) else routers
        self.layers: list[RoutingReport] = list(found)
        self.balance_weight, self.z_weight = balance_weight, z_weight
        _penalties.add(self)
        self.step_load_LE: Int[Tensor, "L E"] | None = None
        """Expert load of the full step, set by `WholeStepBalance` with gradient accumulation."""
        self._spent: dict[int, ref[Tensor]] = {}
        """By the layer's number, the probabilities that the last backward went through, whose graph is freed."""

    def __call__(self) -> Float[Tensor, ""] | None:
        """Return what to add to this rank's loss if gradients are averaged over ranks, as by DDP and FSDP2: `share`
        times the world size. A collective."""
        share = self.share()
        return None if share is None else world_size() * share

    def share(self) -> Float[Tensor, ""] | None:
        """Return this rank's share, a scalar, or None if there is nothing to add. A collective.

        The shares of the ranks add up to the penalty. Raises UserError if the model's own loss in the last forward pass
        had a balance loss.
        """
        if not self.layers or (self.balance_weight == 0 and self.z_weight == 0):
            return None
        if self.balance_weight and any(getattr(layer, "model_balances", False) for layer in self.layers):
            raise UserError(TWO_BALANCE_LOSSES)
        load_LE = global_load(self.layers)
        step_LE = load_LE if self.step_load_LE is None else self.step_load_LE
        fraction_LE = step_LE / step_LE.sum(1, keepdim=True).clamp(min=1)
        routings = {number: layer.routing for number, layer in enumerate(self.layers) if layer.routing is not None}
        assert routings, "the penalty is asked for after the forward"
        spent = {number: probs_TE() for number, probs_TE in self._spent.items()}
        new = {number: each for number, each in routings.items() if spent.get(number) is not each.probs_TE}
        total = None
        for number, routing in (new or routings).items():
            layer, load_E = self.layers[number], load_LE[number]
            fraction_E = fraction_LE[number, : routing.probs_TE.shape[1]]
            tokens = (load_E.sum() / routing.expert_ids_TK.shape[1]).clamp(min=1)
            probs_TE = without_padding(routing, routing.probs_TE)
            share = self.balance_weight * load_balancing_share(probs_TE, fraction_E, tokens, layer.num_choices)
            if self.z_weight:
                share = share + self.z_weight * z_loss_share(routing, tokens)
            total = share if total is None else total + share
        assert total is not None
        if not new:  # read once more after the backward, or a forward that skipped all layers
            total = total.detach()
        elif total.requires_grad:
            read = {number: ref(routing.probs_TE) for number, routing in new.items()}
            total.register_hook(lambda _: self._spent.update(read))
        return total / len(self.layers)


def global_load(layers: Sequence[RoutingReport]) -> Int[Tensor, "L E"]:
    """int64 (layers, E): assignments per expert in the last forward, over all ranks, with zeros after the experts of
    layers that have fewer than others. A collective."""
    loads = [layer.last_load_E for layer in layers]
    device = next((load_E.device for load_E in loads if load_E.device.type != "cpu"), loads[0].device)
    # The loads of a layer that was never called are still on the CPU.
    return sum_over_ranks(pad_sequence([load_E.to(device) for load_E in loads], batch_first=True))
