"""The engine inside transformers' own expert parallelism, for users of its Trainer under FSDP2.

    use_toolkit_ep()
    config = DistributedConfig(fsdp_size=4, ep_size=4, ep_implementation="toolkit")
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)
    place_experts(model, placement)                              # any permutation, at any step boundary
    Trainer(model, args, callbacks=[replan_callback("swap", every=200)], ...)

transformers shards experts as `Shard(0)` DTensors, so every rank has equally many slots and no expert has copies; which
expert is in which slot is free, and may change. `state_dict`, and with it `save_pretrained`, is always in
the order of expert ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from toolkit.errors import UserError
from toolkit.hosts.foreign import compute_rows
from toolkit.moe.dispatch import AllToAllDispatcher
from toolkit.moe.migrate import MigrationReport, migrate
from toolkit.moe.recompute import recomputing
from toolkit.moe.stack import ExpertStack
from toolkit.parallel.groups import ExpertGroups
from toolkit.parallel.unwrapping import unwrapped
from toolkit.placement.placement import ExpertPlacement, contiguous
from toolkit.placement.plan import plan_layer
from toolkit.placement.planners import Planner

if TYPE_CHECKING:
    from transformers import TrainerCallback

NAME = "toolkit"


class PlacedExperts:
    """Brings an experts module its tokens, wherever its experts live. One per module, as its `placed_experts`."""

    needs_shared_batch = False

    def __init__(self, experts: nn.Module, ep_mesh: Any, tp_mesh: Any):
        if tp_mesh.size() > 1:
            raise UserError(
                f"tp_size={tp_mesh.size()} gives ranks a batch in common, which ep_implementation={NAME!r} does not "
                'know: use tp_size=1, or ep_implementation="auto".'
            )
        ranks = ep_mesh.size()
        self.experts, self.experts_forward = experts, experts.forward
        self.slots = int(experts.num_experts)  # type: ignore[arg-type]
        groups = ExpertGroups(ranks, ep_mesh.get_local_rank(), ep_mesh.get_group())
        self.dispatcher = AllToAllDispatcher(contiguous(self.slots * ranks, ranks), groups)
        self.load_E = torch.zeros(self.slots * ranks, dtype=torch.int64)
        """Routed copies per expert on this rank over all training forwards; never reset, so take differences."""
        experts.placed_experts = self  # type: ignore[assignment]
        experts.register_state_dict_post_hook(lambda _, state, prefix, __: self._in_order_of_ids(state, prefix))

    @property
    def placement(self) -> ExpertPlacement:
        return self.dispatcher.placement

    def __call__(self, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        rows, plan = self.dispatcher.dispatch(hidden_TD, ids_TK)
        if self.experts.training and torch.is_grad_enabled() and not recomputing():
            self.load_E = self.load_E.to(plan.load_E.device) + plan.load_E
        rows = compute_rows(self.experts_forward, rows, plan.rows_per_slot)
        return self.dispatcher.combine(rows, plan, weights_TK)

    def place(self, new: ExpertPlacement, optimizer: torch.optim.Optimizer | None = None) -> MigrationReport:
        """Carry weights and optimizer rows to where `new` has them, and route by it. A collective of all ranks."""
        if new.slots_per_rank != self.placement.slots_per_rank:
            raise UserError(
                f"a placement with {new.slots_per_rank} slots per rank cannot be used by "
                f"ep_implementation={NAME!r}, which has {self.placement.slots_per_rank}: "
                "move experts between the slots there are."
            )
        parameters = dict(self.experts.named_parameters(recurse=False))
        storage = _Storage(parameters, self.placement)
        report = migrate(storage.stack, storage.layout(new), storage.local_state(optimizer))
        for parameter in parameters.values():
            parameter.grad = None
        self.dispatcher.place(new)
        return report

    @torch.no_grad()
    def _in_order_of_ids(self, state: dict[str, Any], prefix: str) -> None:
        """What leaves the module leaves it in the order that everybody else expects. A collective of all ranks."""
        blocks = contiguous(self.placement.num_experts, self.placement.ranks)
        if self.placement == blocks:
            return
        copies = {}
        for name, _parameter in self.experts.named_parameters(recurse=False):
            value = state[prefix + name].detach()
            local = value.to_local().clone()
            copies[name] = DTensor.from_local(
                local, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
            )
        storage = _Storage(copies, self.placement)
        migrate(storage.stack, storage.layout(blocks))
        state.update({prefix + name: value for name, value in copies.items()})


class _Storage:
    """What each rank stores of one module, for a migration: FSDP cuts the slots of an expert-parallel rank further."""

    def __init__(self, sharded: Mapping[str, Tensor], placement: ExpertPlacement):
        self.sharded = dict(sharded)
        first = next(iter(self.sharded.values()))
        assert isinstance(first, DTensor)
        ranks_GP = first.device_mesh.mesh.view(-1, placement.ranks)  # how often the slots are cut, times ep_size
        world = dist.get_world_size()
        if sorted(first.device_mesh.mesh.flatten().tolist()) != list(range(world)) or first.device_mesh.ndim > 2:
            raise UserError(
                f"experts spread over a mesh of shape {tuple(first.device_mesh.mesh.shape)} among {world} processes "
                "cannot be moved: use fsdp_size equal to the number of processes, without dp_replicate_size or pp_size."
            )
        self._place_of = {int(rank): divmod(index, placement.ranks) for index, rank in enumerate(ranks_GP.flatten())}
        self._cuts = len(ranks_GP)
        groups = ExpertGroups(world, dist.get_rank(), dist.group.WORLD)
        local = {name: nn.Parameter(_local(value)) for name, value in self.sharded.items()}
        self.stack = ExpertStack(local, self.layout(placement), groups)

    def layout(self, placement: ExpertPlacement) -> ExpertPlacement:
        """Which experts each process stores, where `placement` says which ones each expert-parallel rank computes."""
        rows = []
        for rank in range(len(self._place_of)):
            cut, ep_rank = self._place_of[rank]
            slots = placement.slots[ep_rank]
            size = -(-len(slots) // self._cuts)  # as torch.chunk cuts
            rows.append(slots[cut * size : (cut + 1) * size])
        return ExpertPlacement(tuple(rows))

    def local_state(self, optimizer: torch.optim.Optimizer | None) -> Any:
        """The optimizer's rows that this rank stores, under the parameters that a migration knows."""
        if optimizer is None:
            return None
        states = unwrapped(optimizer).state
        return SimpleNamespace(
            state={
                self.stack.parameters[name]: {key: _local(value) for key, value in states.get(sharded, {}).items()}
                for name, sharded in self.sharded.items()
            }
        )


def _local(value: Any) -> Any:
    return value.to_local().detach() if isinstance(value, DTensor) else value


def use_toolkit_ep() -> str:
    """Make `DistributedConfig(ep_implementation="toolkit")` known to transformers; returns that name.

    Raises UserError where the installed transformers has no place for it.
    """
    try:
        from transformers.distributed.expert_parallel import EPImplementationInterface
    except ImportError:
        import transformers

        raise UserError(
            f"transformers {transformers.__version__} cannot be given an expert-parallel implementation: "
            "use 5.23 or newer, or ExpertParallel under DDP."
        ) from None
    EPImplementationInterface.register(NAME, PlacedExperts)
    return NAME


def placed_experts(model: nn.Module) -> dict[str, PlacedExperts]:
    """The experts of `model` that came under `ep_implementation="toolkit"`, by the name of their module."""
    found = {name: getattr(module, "placed_experts", None) for name, module in model.named_modules()}
    return {name: placed for name, placed in found.items() if isinstance(placed, PlacedExperts)}


def place_experts(
    model: nn.Module,
    placement: ExpertPlacement | Mapping[str, ExpertPlacement],
    optimizer: torch.optim.Optimizer | None = None,
) -> dict[str, MigrationReport]:
    """Move the experts of all layers, or of those named, between a step and the next forward. A collective.

    Pass the optimizer once it has stepped, so that its rows move too.
    """
    layers = placed_experts(model)
    if not layers:
        raise UserError(
            f"model {type(model).__name__} has no experts under ep_implementation={NAME!r}: "
            "call use_toolkit_ep(), and load it with a DistributedConfig that names it."
        )
    wanted = placement if isinstance(placement, Mapping) else dict.fromkeys(layers, placement)
    if unknown := sorted(wanted.keys() - layers.keys()):
        raise UserError(f"model {type(model).__name__} has no experts at {unknown[0]!r}: use one of {list(layers)}.")
    return {name: layers[name].place(new, optimizer) for name, new in wanted.items()}


def replan_callback(planner: str | Planner, *, every: int, **options: Any) -> TrainerCallback:
    """For transformers' Trainer: after each `every` steps, move experts where `planner` wants them for the load since.

    `options` are the planner's. All ranks count together, so they agree.
    """
    from transformers import TrainerCallback

    if every < 1:
        raise UserError(f"every={every} steps is no interval: use at least 1.")

    class Replan(TrainerCallback):
        def __init__(self) -> None:
            self.before: dict[str, Tensor] = {}
            self.reports: list[MigrationReport] = []

        def on_step_end(self, args: Any, state: Any, control: Any, **trainer: Any) -> None:  # noqa: ARG002
            if state.global_step % every:
                return
            model, optimizer = trainer["model"], trainer["optimizer"]
            for name, placed in placed_experts(model).items():
                load_E = placed.load_E - self.before.get(name, torch.zeros_like(placed.load_E)).to(placed.load_E.device)
                self.before[name] = placed.load_E
                dist.all_reduce(load_E)
                per_step_E = load_E.double().cpu() / every
                new = plan_layer(planner, per_step_E, placed.placement, steps=every, **options)
                if new is not None:
                    self.reports.append(placed.place(new, optimizer))

    return Replan()
