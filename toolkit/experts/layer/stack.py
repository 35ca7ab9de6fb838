"""The experts of one layer on this rank: stacked parameters, their placement, and the log of the layer's routing.

The state dict of a module with a partial stack raises; loading a full state dict takes this rank's rows.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ParamSpec
from weakref import WeakSet

import torch
from torch import Tensor, nn

from toolkit.errors import UserError
from toolkit.experts.layer.dispatcher import SLOT_TYPE, Plan, make_dispatcher
from toolkit.experts.layer.model_inputs import counted_tokens
from toolkit.experts.layer.recompute import in_reentrant_forward
from toolkit.experts.layer.routing_log import Choices, RoutedForward, RoutingLog, RowBytes
from toolkit.experts.layer.rows import count
from toolkit.experts.layer.rows_in_files import RowsInFiles
from toolkit.experts.parallel.ddp import leave_out_of_every_ddp
from toolkit.experts.parallel.groups import ExpertGroups
from toolkit.experts.parallel.optimizer_rows import step_by_only
from toolkit.experts.parallel.ownership import local_rows, mark_owned
from toolkit.experts.parallel.sync import ExpertSync, guard_torch
from toolkit.experts.parallel.waits import Mark, mark
from toolkit.experts.placement.placement import EMPTY_ROW, ExpertPlacement

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

P = ParamSpec("P")


class ExpertStack:
    """The stacked parameters of one layer's experts (dimension 0: this rank's slots), their placement and routing log.

    It is the `expert_stack` of our `MoE` and of each other experts module that `shard_experts` or `ExpertParallel`
    sharded.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        placement: ExpertPlacement,
        groups: ExpertGroups,
        *,
        in_files: Mapping[str, RowsInFiles] | None = None,
        computed_on: Mapping[str, torch.device] | None = None,
    ):
        self.parameters: Mapping[str, nn.Parameter] = dict(parameters)
        """By name; dimension 0 counts this rank's slots."""
        self._in_files = dict(in_files or {})
        """Layout in files of the parameters that are not stacked there."""
        self.computed_on = dict(computed_on or {})
        """Name -> device of the computation, of parameters that stay in the host's memory."""
        self.only_names_are_read = False
        """Whether only the names of the module's state dict are read, so that it can hold rows of one rank."""
        self.groups = groups
        self.dispatcher = make_dispatcher(placement, groups)
        self.log = RoutingLog(placement.num_experts, groups)
        self.node_of_peer: Tensor | None = None
        """The node of each rank of the EP group; None unless `count_crossings` was called."""
        self.copies: WeakSet[ExpertStack] = WeakSet()
        """Stacks of copied models, whose experts stay when these experts migrate."""
        self.was_warned_about = False
        """Whether a warning said that this copy's experts stay."""
        self.sync: ExpertSync | None = None
        """Synchronization after each optimizer step under `ExpertParallel`."""
        self.is_timed = False
        """Whether `timed` notes times."""
        self.timing: tuple[Mark, Mark, int] | None = None
        """Begin, end and rows of the experts' last forward pass."""
        self.mark_rows()
        if groups.ep_size > 1:
            leave_out_of_every_ddp()
            guard_torch()

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertStack:
        """The experts of a copied model, on the same ranks, with an empty log."""
        other = memo[id(self)] = object.__new__(type(self))
        other.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        other.was_warned_about = False
        self.copies.add(other)
        if self.sync is not None and (self.groups.expert_dp_group is not None or self.placement.has_replicas):
            step_by_only(None, other.parameters.values())  # nothing averages gradients of a copy
        return other

    def all_copies(self) -> Iterator[ExpertStack]:
        """The copies, and copies of them."""
        for each in self.copies:
            yield each
            yield from each.all_copies()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "copies": None, "sync": None, "is_timed": False, "timing": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.copies = WeakSet()
        self.mark_rows()  # pickling drops the marks of parameters

    @property
    def device(self) -> torch.device:
        """Return the device on which the experts are computed and their rows exchanged."""
        return next(iter(self.computed_on.values()), next(iter(self.parameters.values())).device)

    @property
    def placement(self) -> ExpertPlacement:
        return self.dispatcher.placement

    def in_files(self, name: str) -> RowsInFiles:
        """Return how files have the rows of the parameter `name`."""
        return self._in_files.get(name, "stacked")

    @property
    def is_part(self) -> bool:
        """Whether rows on this rank are not all experts, or in another order or form than in files."""
        in_order = self.placement.slots == (tuple(range(self.num_experts)),)
        return self.groups.ep_size > 1 or not in_order or any(form != "stacked" for form in self._in_files.values())

    @property
    def slots(self) -> int:
        """Rows of each parameter on this rank."""
        return len(self.placement.slots[self.groups.ep_rank])

    @property
    def num_experts(self) -> int:
        return self.placement.num_experts

    def row(self, rows: Tensor, expert: int) -> Tensor | None:
        """Return an expert's row of a tensor with a row per slot, as a view; None on ranks without the expert.

        Change the view in place, the same on all ranks that have it: replicas, and ranks of the expert data-parallel
        group. Call `row` again after a migration.

        Args:
            rows: One of `parameters`, its gradient or its optimizer state, shape (slots, ...).
            expert: Id of the expert.

        Raises:
            UserError: The layer lacks this expert, or `rows` has no row per slot.

        Example:
            >>> stack = experts.stacks["model.layers.0.mlp.experts"]
            >>> with torch.no_grad():
            ...     for parameter in stack.parameters.values():
            ...         if (row := stack.row(parameter, 3)) is not None:
            ...             row.zero_()
        """
        if not 0 <= expert < self.num_experts or len(rows) != self.slots:
            raise UserError(
                f"expert: {expert} of a tensor with {len(rows)} rows. Pass an id below {self.num_experts} and a tensor "
                f"with {self.slots} rows, one per slot of this rank."
            )
        slots = self.placement.slots[self.groups.ep_rank]
        return rows[slots.index(expert)] if expert in slots else None

    def place(self, new: ExpertPlacement) -> None:
        """Use the placement `new`, by which rows must already be in their slots: see
        `toolkit.experts.moving.migrate`."""
        if new.slots_per_rank != self.placement.slots_per_rank:
            raise ValueError(f"placements of a layer have the same slots: not\n{new}\nafter\n{self.placement}")
        surprising = [each for each in self.copies if not each.was_warned_about]
        if surprising and new != self.placement:
            for each in surprising:
                each.was_warned_about = True
            warnings.warn(
                "the experts of a copy of this model (an EMA, a reference model) stay in their slots while experts "
                "move. Average weights by toolkit.experts.ema_update(copy, model), or call place_experts(copy, "
                "placements, None) first.",
                stacklevel=3,
            )
        self.dispatcher.place(new)
        self.mark_rows()

    @torch.no_grad()
    def adopt(self, rows_of_ranks: Sequence[Sequence[int]]) -> None:
        """Adopt the placement of a checkpoint before its rows are read, so that no expert has to migrate.

        The placement is unchanged if this run has different ranks or slots.
        """
        saved = ExpertPlacement(tuple(tuple(row) for row in rows_of_ranks))
        if saved == self.placement or saved.slots_per_rank != self.placement.slots_per_rank:
            return
        self.place(saved)
        for parameter in self.parameters.values():
            clear_empty(local_rows(parameter), saved.slots[self.groups.ep_rank])

    def record(
        self,
        plan: Plan,
        expert_ids_TK: Int[Tensor, "T K"],
        inputs: Float[Tensor, "*batch D"],
        weights_TK: Float[Tensor, "T K"],
        outputs: Float[Tensor, "*batch D"],
        kept_TK: Bool[Tensor, "T K"] | None = None,
    ) -> None:
        """Log the forward pass that `plan` dispatched; without gradients, set only `last_load_E`.

        `inputs` (..., D) were dispatched to `expert_ids_TK` with `weights_TK` and gave `outputs` (..., D). `kept_TK`:
        False for pairs dropped by a capacity, which are not in the plan's `load_E`. Pairs of padding are not counted.
        """
        counted_T = counted_tokens(len(expert_ids_TK))
        choices = Choices(expert_ids_TK, counted_T)
        dropped_E = None if kept_TK is None else count(expert_ids_TK, self.num_experts, ~kept_TK & choices.counted())
        if counted_T is None:
            load_E = plan.load_E if dropped_E is None else plan.load_E + dropped_E
        else:
            load_E = choices.load(self.num_experts)
        self.log.last_load_E = load_E
        # Not `training` of the module: a model that was read from a folder is in eval mode until train() is called.
        if not torch.is_grad_enabled() and not in_reentrant_forward():
            return
        visits_P = crossed = None
        if plan.visits_TP is not None:
            visits_TP = plan.visits_TP
            if counted_T is not None:
                visits_TP = visits_TP & counted_T[:, None]
            visits_P = visits_TP.sum(0)
            if self.node_of_peer is not None:
                self.node_of_peer = self.node_of_peer.to(load_E.device)
                crossed = crossings(visits_TP, self.node_of_peer, self.groups.ep_rank)
        # Slots have no gradients, so half of them per pass.
        with_row = plan.slots_TK.shape[1] * (weights_TK.element_size() + SLOT_TYPE.itemsize // 2)
        sent, returned = (rows.shape[-1] * rows.element_size() for rows in (inputs, outputs))
        row_bytes = RowBytes(sent + with_row, returned)
        self.log.add(RoutedForward(self.placement, load_E, dropped_E, visits_P, crossed, row_bytes, choices))

    def timed(self, rows: int, compute: Callable[P, Tensor], *args: P.args, **kwargs: P.kwargs) -> Tensor:
        """Call the experts' forward pass `compute` of `rows` rows, and note its time, without a host sync.

        Nothing is noted in compiled code.
        """
        if torch.compiler.is_compiling() or not self.is_timed:
            return compute(*args, **kwargs)
        begin = mark(self.device)
        outputs = compute(*args, **kwargs)
        self.timing = begin, mark(self.device), rows
        return outputs

    def count_crossings(self, node_of_peer: Sequence[int]) -> None:
        """Count the tokens that go to each other node, from now on, given the node of each rank of the EP group."""
        self.node_of_peer = torch.tensor(node_of_peer).unique(return_inverse=True)[1]

    def replace_parameters(self, new: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Have the values of `new`, such as shards of FSDP2, instead of the keys."""
        self.parameters = {name: new.get(parameter, parameter) for name, parameter in self.parameters.items()}
        self.mark_rows()

    def mark_rows(self) -> None:
        """Declare which rows this rank owns, under the ids of their experts."""
        groups, placement = self.groups, self.placement
        mark_owned(
            *self.parameters.values(),
            row_ids=placement.slots[groups.ep_rank],
            groups=groups,
            rows_of_ranks=placement.slots if placement.has_replicas else None,
        )


class ExpertLayer(nn.Module):
    """A module with experts: our `MoE`, and a module of another library whose experts are sharded."""

    expert_stack: ExpertStack

    @property
    def module_with_rows(self) -> nn.Module:
        """The module whose own parameters are the experts' rows."""
        return self

    def without_tokens(self, x_TD: Float[Tensor, "T D"], weights_TK: Float[Tensor, "T K"]) -> tuple[Tensor, ...]:
        """Return the arguments of a forward pass without tokens: `x_TD` and `weights_TK` have no rows."""
        raise NotImplementedError


def crossings(visits_TP: Bool[Tensor, "T P"], node_of_peer_P: Int[Tensor, " P"], here: int) -> Int[Tensor, " G"]:
    """Return int64: distinct tokens sent to each node except the node of peer `here`. No host sync.

    `node_of_peer_P`: int64, numbered from 0. The result has one count per peer, the maximum number of nodes.
    """
    ranks_TG = torch.zeros_like(visits_TP, dtype=torch.int64).index_add_(1, node_of_peer_P, visits_TP.long())
    return (ranks_TG > 0).sum(0).index_fill_(0, node_of_peer_P[here], 0)


def weight_bytes(stack: ExpertStack) -> int:
    """Bytes of the weights of one physical expert of `stack`."""
    return sum(bytes_of_slot(parameter) for parameter in stack.parameters.values())


def bytes_of_slot(rows: Tensor) -> int:
    """Bytes on this rank of one slot's row, also without slots."""
    rows = local_rows(rows)
    return rows.shape[1:].numel() * rows.element_size()


def expert_stacks(model: nn.Module) -> dict[str, ExpertStack]:
    """The expert stacks of `model` by the name of their module, in the order of modules."""
    return {name: module.expert_stack for name, module in model.named_modules() if isinstance(module, ExpertLayer)}


# --- state dicts ----------------------------------------------------------------------------------------------------


def hook_state_dict(module: ExpertLayer) -> None:
    """Make `state_dict()` of `module` raise if its experts are partial, and loading take this rank's rows."""
    module.register_state_dict_pre_hook(_refuse_partial_state_dict)
    module.register_load_state_dict_pre_hook(_take_rows)


def _refuse_partial_state_dict(module: Any, prefix: str, keep_vars: bool) -> None:  # noqa: ARG001
    """Raise UserError if the experts of this rank, in slot order, would be mistaken for all experts.

    `keep_vars=True` returns the parameters of this rank.
    """
    stack: ExpertStack = module.expert_stack
    if not keep_vars and not stack.only_names_are_read and stack.is_part:
        raise UserError(
            "model.state_dict(): it would have the experts of this rank only, in the order of slots. "
            "Call whole_state_dict(model) of toolkit.experts.state.state_dict on every rank."
        )


def _take_rows(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Take the rows of this rank's slots out of experts as files have them, all in order of ids."""
    stack: ExpertStack = module.expert_stack
    in_rows = {id(parameter) for name, parameter in stack.parameters.items() if stack.in_files(name) == "stacked"}
    for name, parameter in module.named_parameters():
        whole = state.get(prefix + name)
        if id(parameter) in in_rows and whole is not None and len(whole) == stack.num_experts:
            state[prefix + name] = rows_of(whole, stack.placement.slots[stack.groups.ep_rank])


def rows_of(whole: Tensor, experts: Sequence[int]) -> Tensor:
    """Return the rows of `experts`, zeros for an empty slot."""
    index = torch.tensor([max(expert, 0) for expert in experts], dtype=torch.int64, device=whole.device)
    return clear_empty(whole.index_select(0, index), experts)


def clear_empty(rows: Tensor, experts: Sequence[int]) -> Tensor:
    """Return `rows`, whose empty slots are made zeros in place."""
    for slot, expert in enumerate(experts):
        if expert == EMPTY_ROW:
            rows[slot].zero_()
    return rows


@contextmanager
def only_names_are_read(model: nn.Module) -> Iterator[None]:
    """Allow state dicts of `model` for their names, which PEFT reads to load adapters."""
    stacks = list(expert_stacks(model).values())
    for stack in stacks:
        stack.only_names_are_read = True
    try:
        yield
    finally:
        for stack in stacks:
            stack.only_names_are_read = False
