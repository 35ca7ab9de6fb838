"""Placement, migration and resuming inside transformers' own expert parallelism, for users of its Trainer under FSDP2.

    use_toolkit_ep()
    config = DistributedConfig(fsdp_size=4, ep_size=4, ep_implementation="toolkit")
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)
    place_experts(model, placement, optimizer)                   # any permutation, at any step boundary
    Trainer(model, args, callbacks=[replan_callback(ReplanOptions(planner="swap", every=200))], ...)

transformers shards experts as `Shard(0)` DTensors, so every rank has equally many slots and no expert has replicas;
which expert is in which slot is free, and may change. State dicts, and with them `save_pretrained`, are always in the
order of expert ids.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from toolkit.errors import UserError
from toolkit.experts.layer.stack import ExpertStack, expert_stacks
from toolkit.experts.moving.migrate import migrate
from toolkit.experts.moving.replan import Replanner
from toolkit.experts.moving.replan_options import ReplanOptions
from toolkit.experts.parallel.groups import ExpertGroups
from toolkit.experts.parallel.optimizer_rows import refuse_coupled_rows
from toolkit.experts.parallel.ownership import shard_like, spread_like
from toolkit.experts.placement.placement import ExpertPlacement, contiguous
from toolkit.experts.sharding.experts_modules import run_experts
from toolkit.integrations.accelerate.expert_parallel import describe_balance
from toolkit.integrations.transformers.compat import register_ep_implementation
from toolkit.integrations.transformers.training_state import TrainingState

if TYPE_CHECKING:
    from transformers import TrainerCallback

NAME = "toolkit"


class ShardedStack(ExpertStack):
    """Experts that transformers holds as DTensors: FSDP may shard the slots of an expert-parallel rank further.

    FSDP replaces parameters after this is made, so `mark` is to be called again before they are saved or loaded.
    """

    def __init__(self, module: nn.Module, placement: ExpertPlacement, groups: ExpertGroups):
        self._module = module
        super().__init__({}, placement, groups)

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        return dict(self._module.named_parameters(recurse=False))

    @property
    def storage_groups(self) -> ExpertGroups:
        return ExpertGroups(dist.get_world_size(), dist.get_rank(), dist.group.WORLD)

    @cached_property
    def _coordinates(self) -> list[tuple[int, int]]:
        """Returns of each process: which part of its slots it stores, and its expert-parallel rank."""
        first, world = next(iter(self.parameters.values())), dist.get_world_size()
        assert isinstance(first, DTensor)
        mesh = first.device_mesh.mesh
        if sorted(mesh.flatten().tolist()) != list(range(world)) or mesh.ndim > 2:
            raise UserError(
                f"experts spread over a mesh of shape {tuple(mesh.shape)} among {world} processes "
                "cannot be moved: use fsdp_size equal to the number of processes, without dp_replicate_size or pp_size."
            )
        at = {int(rank): divmod(index, self.placement.ranks) for index, rank in enumerate(mesh.flatten())}
        return [at[rank] for rank in range(world)]

    def stored(self, placement: ExpertPlacement) -> ExpertPlacement:
        shards = len(self._coordinates) // placement.ranks
        rows = []
        for shard, ep_rank in self._coordinates:
            slots = placement.slots[ep_rank]
            size = -(-len(slots) // shards)  # as torch.chunk cuts
            rows.append(slots[shard * size : (shard + 1) * size])
        return ExpertPlacement(tuple(rows))

    def adopt(self, rows_of_ranks: Sequence[Sequence[int]]) -> None:
        if len(rows_of_ranks) != len(self._coordinates):
            return
        slots: list[list[int]] = [[] for _ in range(self.placement.ranks)]
        for (_, ep_rank), rows in sorted(zip(self._coordinates, rows_of_ranks, strict=True)):
            slots[ep_rank] += rows
        super().adopt(slots)

    def mark(self) -> None:
        first = next(iter(self.parameters.values()))
        if isinstance(first, DTensor) and not first.is_meta and first.device_mesh.size() == dist.get_world_size():
            super().mark()


class ToolkitEP:
    """An expert-parallel implementation of transformers, made for each experts module: see `EPImplementation` there.

    The module's `expert_stack` is as in every other host. Raises UserError where ranks share a batch.
    """

    needs_shared_batch = False

    def __init__(self, experts: nn.Module, ep_mesh: Any, tp_mesh: Any):
        if tp_mesh.size() > 1:
            raise UserError(
                f"tp_size={tp_mesh.size()} gives ranks a batch in common, which ep_implementation={NAME!r} does not "
                'know: use tp_size=1, or ep_implementation="auto".'
            )
        ranks, slots = ep_mesh.size(), int(experts.num_experts)  # type: ignore[arg-type]
        groups = ExpertGroups(ranks, ep_mesh.get_local_rank(), ep_mesh.get_group())
        self.experts, self.forward = experts, experts.forward
        self.stack = ShardedStack(experts, contiguous(slots * ranks, ranks), groups)
        experts.expert_stack = self.stack  # type: ignore[assignment]
        experts.register_state_dict_post_hook(lambda _, state, prefix, __: self._to_order_of_ids(state, prefix))
        experts.register_load_state_dict_pre_hook(lambda _, state, prefix, *__: self._to_slots(state, prefix))

    def __call__(self, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """(T, D), of this rank's tokens."""
        return run_experts(self.experts, self.stack, self.forward, hidden_TD, ids_TK, weights_TK)

    @torch.no_grad()
    def _to_order_of_ids(self, state: dict[str, Any], prefix: str) -> None:
        """Reorder what leaves the module as its other readers expect. A collective of all ranks."""
        stack = self.stack
        held = {name: state[prefix + name] for name in stack.parameters}
        moved = self._moved(held, stack.placement, contiguous(stack.num_experts, stack.placement.ranks))
        state.update({prefix + name: value for name, value in moved.items()})

    @torch.no_grad()
    def _to_slots(self, state: dict[str, Any], prefix: str) -> None:
        """Reorder what is loaded from the order of ids: whole tensors, or DTensors with this module's layout."""
        stack = self.stack
        loaded = {name: state[prefix + name] for name in stack.parameters if prefix + name in state}
        sharded = {name: value for name, value in loaded.items() if isinstance(value, DTensor)}
        sharded = self._moved(sharded, contiguous(stack.num_experts, stack.placement.ranks), stack.placement)
        for name in loaded.keys() - sharded.keys():
            here = list(stack.stored(stack.placement).slots[dist.get_rank()])
            parameter = stack.parameters[name]
            sharded[name] = shard_like(parameter, loaded[name][here].to(parameter.device))
        state.update({prefix + name: value for name, value in sharded.items()})

    def _moved(self, tensors: dict[str, DTensor], held: ExpertPlacement, wanted: ExpertPlacement) -> dict[str, DTensor]:
        """Return `tensors`, whose rows are placed as in `held`, placed as in `wanted`. A collective of all ranks."""
        if not tensors or held == wanted:
            return tensors
        module = nn.Module()
        for name, value in tensors.items():
            copied = shard_like(value, value.to_local().detach().clone())
            module.register_parameter(name, nn.Parameter(copied, requires_grad=False))
        migrate(ShardedStack(module, held, self.stack.groups), wanted, None)
        return {name: parameter.data for name, parameter in module.named_parameters()}  # type: ignore[misc]


def use_toolkit_ep() -> str:
    """Make `DistributedConfig(ep_implementation="toolkit")` known to transformers, 5.23 or newer; returns that name."""
    register_ep_implementation(NAME, ToolkitEP)
    return NAME


def replan_callback(options: ReplanOptions) -> TrainerCallback:
    """Returns a callback of transformers' Trainer that moves experts between steps, and adds their load to its logs.

    Its `replanner` is a `toolkit.experts.moving.replan.Replanner`. Trainer does not resume models that were sharded
    when they were loaded. With this callback it does: pass `save_only_model=True`, and the callback adds parameters,
    optimizer, scheduler, random states, placement and guard to each checkpoint, and restores them after
    `trainer.train(resume_from_checkpoint=...)`. Rank 0 prints which balance penalty is active when training begins. The
    load of experts, in five numbers over all layers and ranks, is in `log_history`, and in what callbacks after this
    one are given.

    Args:
        options: When experts are moved, and by which planner.

    Raises:
        UserError: On resuming from a checkpoint outside `output_dir` or without these; for a model whose experts cannot
            move, as under DDP alone; and for two balance penalties.
    """
    from transformers import TrainerCallback

    replanner = Replanner({}, options)

    class Replan(TrainingState, TrainerCallback):
        replanner: Replanner

        def on_init_end(self, args: Any, state: Any, control: Any, **trainer: Any) -> None:  # noqa: ARG002
            for module in trainer["model"].modules():
                if any(isinstance(parameter, DTensor) for parameter in module.parameters(recurse=False)):
                    module.register_load_state_dict_pre_hook(_distribute)

        def on_train_begin(self, args: Any, state: Any, control: Any, **trainer: Any) -> None:
            model = trainer["model"]
            stacks = expert_stacks(model)
            if not stacks:
                raise UserError(
                    f"replan_callback found no experts in {type(model).__name__} that it could move: load the model "
                    'with use_toolkit_ep() and a DistributedConfig of ep_implementation="toolkit", because under DDP '
                    "alone Trainer has all experts on every rank."
                )
            balance = describe_balance(model)
            if state.is_world_process_zero:
                sys.stdout.write(f"{balance}\n")
            for stack in stacks.values():
                stack.mark()
            refuse_coupled_rows(trainer["optimizer"])
            self.replanner.watch(stacks)
            super().on_train_begin(args, state, control, **trainer)

        def on_step_end(self, args: Any, state: Any, control: Any, **trainer: Any) -> None:  # noqa: ARG002
            self.replanner.after_step(state.global_step, trainer["optimizer"])

        def on_log(self, args: Any, state: Any, control: Any, **trainer: Any) -> None:  # noqa: ARG002
            if "loss" in (logs := trainer["logs"]):
                metrics = self.load_metrics()
                logs.update(metrics)
                state.log_history[-1].update(metrics)  # which Trainer wrote before it called this

    return Replan(replanner)


def _distribute(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before whole tensors are loaded into parameters that are sharded: shard them alike."""
    for name, parameter in module.named_parameters(recurse=False):
        value = state.get(prefix + name)
        if isinstance(parameter, DTensor) and value is not None and not isinstance(value, DTensor):
            state[prefix + name] = spread_like(parameter, value)
