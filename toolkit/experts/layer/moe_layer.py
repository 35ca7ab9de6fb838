"""The MoE layer: route, dispatch, compute, combine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self, SupportsFloat, SupportsIndex

import torch
from torch import Tensor, nn

from toolkit.errors import require, require_choice, require_count, require_type
from toolkit.experts.layer.capacity import within_capacity
from toolkit.experts.layer.grouped_experts import Activation, GroupedExperts, Weights
from toolkit.experts.layer.model_inputs import counted_tokens
from toolkit.experts.layer.recompute import Recompute, checkpoint, decide, recomputing
from toolkit.experts.layer.router import Routing, TopKRouter
from toolkit.experts.layer.router_options import RouterOptions
from toolkit.experts.layer.stack import ExpertLayer, ExpertStack, expert_stacks, hook_state_dict
from toolkit.experts.parallel.groups import ExpertGroups
from toolkit.experts.placement.placement import ExpertPlacement, initial_placement
from toolkit.experts.placement.placement_options import InitialPlacement

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


class MoE(ExpertLayer):
    """MoE layer: the weighted sum of the outputs of each token's K experts, plus the shared expert's, if any.

    With expert parallelism the forward pass is a collective: every rank calls it equally often, with any number of
    tokens, including zero. With a `capacity_factor`, pairs are dropped in training, never in evaluation. With
    `recompute`, the layer saves no activations and runs again in the backward pass, with the same routing.
    """

    experts: Any
    """`GroupedExperts`, or a module of the `expert_type` of `make_moe`."""

    def __init__(
        self,
        router: TopKRouter,
        experts: nn.Module,
        expert_stack: ExpertStack,
        shared_expert: nn.Module | None = None,
        *,
        capacity_factor: float | None = None,
        recompute: bool = False,
    ):
        super().__init__()
        self.router, self.experts, self.expert_stack, self.shared_expert = router, experts, expert_stack, shared_expert
        self.capacity_factor, self.recompute = capacity_factor, recompute
        self.routing: Routing | None = None
        """Routing of the last forward pass, for the router losses."""
        hook_state_dict(self)

    @property
    def module_with_rows(self) -> nn.Module:
        experts: nn.Module = self.experts
        return experts

    def __getstate__(self) -> dict[str, Any]:
        """For copies: without the routing, whose tensors are in the graph of the last forward."""
        return self.__dict__ | {"routing": None}

    @property
    def placement(self) -> ExpertPlacement:
        """The logical expert in each slot of each rank."""
        return self.expert_stack.placement

    @property
    def load_E(self) -> Int[Tensor, " E"]:
        """Assignments per expert on this rank over all training forwards, dropped ones included."""
        return self.expert_stack.log.load_E

    @property
    def last_load_E(self) -> Int[Tensor, " E"]:
        """Tokens per expert of the last forward pass, in training or evaluation."""
        return self.expert_stack.log.last_load_E

    @property
    def num_choices(self) -> Tensor | int:
        """How many experts the router can choose."""
        return self.router.num_choices

    def forward(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
        """(..., D) to (..., D)."""
        return checkpoint(self._forward, x) if self.recompute else self._forward(x)

    def without_tokens(self, x_TD: Float[Tensor, "T D"], weights_TK: Float[Tensor, "T K"]) -> tuple[Tensor, ...]:  # noqa: ARG002
        return (x_TD,)

    def _forward(self, x: Tensor) -> Tensor:
        x_TD = x.reshape(-1, x.shape[-1])
        routing = self.router(x_TD)
        kept_TK: Tensor | None = None
        if (factor := self.capacity_factor) is not None and self.training:
            kept_TK = decide(
                lambda: within_capacity(routing.expert_ids_TK, routing.weights_TK, self.router.num_experts, factor)
            )
        shared_TD: Tensor | None = None
        weights: Weights | None = None
        # So that weight gradients are computed while the gradients of rows are in flight. Not with the class that FSDP2
        # makes, which gathers its parameters when it is called.
        later = torch.is_grad_enabled() and type(self.experts) is GroupedExperts and self.placement.ranks > 1

        def meanwhile() -> None:
            nonlocal shared_TD, weights
            if self.shared_expert is not None:
                shared_TD = self.shared_expert(x_TD)
            if later:
                weights = self.experts.weights()

        dispatcher, timed = self.expert_stack.dispatcher, self.expert_stack.timed
        x_RD, dispatched = dispatcher.receive(
            x_TD, routing.expert_ids_TK, routing.weights_TK, kept_TK=kept_TK, meanwhile=meanwhile
        )
        pairs, rows_per_slot = dispatched.pairs, dispatched.rows_per_slot
        if type(self.experts).forward is GroupedExperts.forward:
            y_RD = timed(len(pairs.order.pair), self.experts, x_RD, rows_per_slot, weights, pairs)
        else:
            rows_ND = pairs.permute(x_RD)
            y_RD = pairs.unpermute(timed(len(rows_ND), self.experts, rows_ND, rows_per_slot))
        y_TD = dispatcher.send_back(y_RD, dispatched)
        if shared_TD is not None:
            y_TD = y_TD + shared_TD
        if not recomputing():
            counted_T, ids_TK = counted_tokens(len(x_TD)), routing.expert_ids_TK
            self.routing = routing if counted_T is None else replace(routing, counted_T=counted_T)
            self.expert_stack.record(dispatched.plan, ids_TK, x_TD, routing.weights_TK, y_TD, kept_TK)
        return y_TD.view(x.shape)


def make_moe(
    dim: int,
    hidden_dim: int,
    num_experts: int,
    top_k: int,
    *,
    groups: ExpertGroups | None = None,
    placement: ExpertPlacement | InitialPlacement = "contiguous",
    spare_slots: int = 0,
    activation: Activation = "relu",
    shared_expert: nn.Module | None = None,
    capacity_factor: float | None = None,
    recompute: Recompute = "none",
    router: RouterOptions | None = None,
    router_type: Callable[..., TopKRouter] = TopKRouter,
    expert_type: Callable[..., nn.Module] = GroupedExperts,
    seed: int = 0,
) -> MoE:
    """Return a layer whose tokens use `top_k` of `num_experts` experts each: it maps (..., `dim`) to (..., `dim`).

    For experts that are split, merged and pruned while training: `toolkit.dynamic.dynamic_layer`.

    Args:
        dim: Input and output width of the experts.
        hidden_dim: Hidden width of each expert.
        num_experts: Experts over all ranks of a group.
        top_k: Experts of each token.
        groups: Ranks that share the experts. None: every rank has all experts.
        placement: Initial placement: contiguous, round-robin, or an `ExpertPlacement`.
        spare_slots: Empty slots per rank for replicas, with contiguous or round-robin placement.
        activation: Activation function of the experts.
        shared_expert: A module applied to every token.
        capacity_factor: Most pairs of an expert over the mean. Default: no pair is dropped.
        recompute: Activation checkpointing: none, the experts' hidden activations (selective), or the layer (full).
        router: Router options. None: a softmax and a balance loss.
        router_type: A class to use instead of `TopKRouter`.
        expert_type: A class to use instead of `GroupedExperts`, with the same `__init__` arguments. Its parameters have
            one row per slot. It is called with rows (N, D) in slot order and the rows of each slot, int64 (S,).
        seed: Seed of the initial weights, which depend on an expert's id and not on its rank.

    Raises:
        UserError: For an argument of another type, sizes below 1, fewer `spare_slots` than 0, a `capacity_factor` of 0
            or less, a `top_k` that does not fit, and an unknown `placement`, `activation` or `recompute`.
        ValueError: For a placement of other experts.

    Example:
        >>> import torch
        >>> from toolkit import experts
        >>> layer = experts.make_moe(dim=64, hidden_dim=128, num_experts=8, top_k=2)
        >>> layer(torch.randn(3, 5, 64)).shape
        torch.Size([3, 5, 64])
    """
    for name, size in (("dim", dim), ("hidden_dim", hidden_dim), ("num_experts", num_experts), ("top_k", top_k)):
        require_count(name, size)
    for name, value, kind, remedy in (
        ("groups", groups, ExpertGroups | None, "Pass the result of make_expert_groups"),
        ("placement", placement, ExpertPlacement | str, 'Pass "contiguous", "round_robin" or an ExpertPlacement'),
        ("shared_expert", shared_expert, nn.Module | None, "Pass a module"),
        ("capacity_factor", capacity_factor, SupportsFloat | None, "Pass a number, or None to drop nothing"),
        ("router", router, RouterOptions | None, "Pass RouterOptions()"),
        ("seed", seed, SupportsIndex, "Pass an integer"),
    ):
        require_type(name, value, kind, remedy)
    for name, maker in (("router_type", router_type), ("expert_type", expert_type)):
        require(callable(maker) and not isinstance(maker, nn.Module), name, type(maker), "take a class or a function")
    require_count("spare_slots", spare_slots, least=0)
    require_choice("activation", activation, Activation)
    require(
        capacity_factor is None or capacity_factor > 0,
        "capacity_factor",
        capacity_factor,
        "take a number above 0, or None to drop nothing",
    )
    require_choice("recompute", recompute, Recompute)
    groups = groups or ExpertGroups()
    if isinstance(placement, str):
        placement = initial_placement(num_experts, groups.ep_size, placement, spare_slots=spare_slots)
    if placement.num_experts != num_experts:
        raise ValueError(f"a placement of {placement.num_experts} experts for a layer of {num_experts}")
    experts = expert_type(
        dim,
        hidden_dim,
        expert_ids=placement.slots[groups.ep_rank],
        activation=activation,
        recompute=recompute == "selective",
        seed=seed,
    )
    stack = ExpertStack(dict(experts.named_parameters(recurse=False)), placement, groups)
    return MoE(
        router_type(dim, num_experts, top_k, router),
        experts,
        stack,
        shared_expert,
        capacity_factor=capacity_factor,
        recompute=recompute == "full",
    )


def moe_layers(model: nn.Module) -> dict[str, MoE]:
    """The MoE layers of `model` by name, in the order of its modules."""
    return {name: module for name, module in model.named_modules() if isinstance(module, MoE)}


@dataclass(frozen=True, eq=False)
class Experts:
    """The layers with experts of a model, found once by its entry points; empty without experts."""

    stacks: Mapping[str, ExpertStack]
    """By the name of the layer, in the order of modules."""
    layers: Mapping[str, nn.Module]
    """The module of each of `stacks`."""

    @classmethod
    def of(cls, model: nn.Module) -> Self:
        """Find the experts of `model`, also within wrappers."""
        stacks = expert_stacks(model)
        return cls(stacks, {name: model.get_submodule(name) for name in stacks})

    @property
    def moe(self) -> dict[str, MoE]:
        """The toolkit's own layers, whose routers it knows."""
        return {name: layer for name, layer in self.layers.items() if isinstance(layer, MoE)}

    @property
    def groups(self) -> ExpertGroups | None:
        """The ranks that share the experts, None without experts."""
        return next((stack.groups for stack in self.stacks.values()), None)

    def active(self, name: str) -> Bool[Tensor, " E"]:
        """Whether each logical expert of a layer is active: all but in layers of dynamic experts."""
        active_E = getattr(getattr(self.layers[name], "router", None), "active_E", None)
        return torch.ones(self.stacks[name].num_experts, dtype=torch.bool) if active_E is None else active_E.cpu() > 0

    def on_ranks(self) -> dict[str, list[list[int]]]:
        """The logical experts on each rank by layer, without empty slots and inactive experts. A host sync."""
        active = {name: set(self.active(name).nonzero().flatten().tolist()) for name in self.stacks}
        return {
            name: [[expert for expert in row if expert in active[name]] for row in stack.placement.slots]
            for name, stack in self.stacks.items()
        }
