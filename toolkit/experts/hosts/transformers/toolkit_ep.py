"""Placement and migration inside transformers' own expert parallelism, for users of its Trainer under FSDP2.

    use_toolkit_ep()
    config = DistributedConfig(fsdp_size=4, ep_size=4, ep_implementation="toolkit")
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)
    place_experts(model, placement)                              # any permutation, at any step boundary
    Trainer(model, args, callbacks=[replan_callback(ReplanOptions(planner="swap", every=200))], ...)

transformers shards experts as `Shard(0)` DTensors, so every rank has equally many slots and no expert has replicas;
which expert is in which slot is free, and may change. State dicts, and with them `save_pretrained`, are always in the
order of expert ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from toolkit.compat import register_ep_implementation
from toolkit.errors import UserError
from toolkit.experts.hosts.spreading.foreign import run_experts
from toolkit.experts.layer.stack import ExpertStack
from toolkit.experts.moving.migrate import migrate
from toolkit.experts.parallel.groups import ExpertGroups
from toolkit.experts.parallel.ownership import shard_like
from toolkit.experts.placement.placement import ExpertPlacement, contiguous

NAME = "toolkit"


class ShardedStack(ExpertStack):
    """Experts that transformers holds as DTensors: FSDP may shard the slots of an expert-parallel rank further.

    FSDP replaces parameters after this is made, so `mark` is to be called again before they are saved or loaded.
    """

    def __init__(self, module: nn.Module, placement: ExpertPlacement, groups: ExpertGroups):
        self._module = module
        super().__init__({}, placement, groups)

    def __getstate__(self) -> dict[str, Any]:
        raise UserError(
            f"a model under ep_implementation={NAME!r} cannot be copied or pickled, as FSDP2 cannot: load another with "
            "from_pretrained, or use ExpertParallel under DDP."
        )

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
        by_id = contiguous(stack.num_experts, stack.placement.ranks)
        if stack.placement == by_id:
            return
        copies = {name: _clone(state[prefix + name]) for name in stack.parameters}
        migrate(ShardedStack(_holding(copies), stack.placement, stack.groups), by_id)
        state.update({prefix + name: value for name, value in copies.items()})

    @torch.no_grad()
    def _to_slots(self, state: dict[str, Any], prefix: str) -> None:
        """Reorder what is loaded from the order of ids: whole tensors, or DTensors with this module's layout."""
        stack = self.stack
        loaded = {name: state[prefix + name] for name in stack.parameters if prefix + name in state}
        by_id = contiguous(stack.num_experts, stack.placement.ranks)
        sharded = {name: _clone(value) for name, value in loaded.items() if isinstance(value, DTensor)}
        if sharded and stack.placement != by_id:
            migrate(ShardedStack(_holding(sharded), by_id, stack.groups), stack.placement)
        for name in loaded.keys() - sharded.keys():
            here = list(stack.stored(stack.placement).slots[dist.get_rank()])
            parameter = stack.parameters[name]
            sharded[name] = shard_like(parameter, loaded[name][here].to(parameter.device))
        state.update({prefix + name: value for name, value in sharded.items()})


def _clone(value: DTensor) -> DTensor:
    return shard_like(value, value.to_local().detach().clone())


def _holding(tensors: Mapping[str, Tensor]) -> nn.Module:
    """A module with `tensors` as its parameters."""
    module = nn.Module()
    for name, value in tensors.items():
        module.register_parameter(name, nn.Parameter(value, requires_grad=False))
    return module


def refuse_adapters(model: nn.Module) -> None:
    """Raise UserError where experts have PEFT's adapters, which transformers' expert parallelism does not spread.

    Without this, PEFT's forward ends in an error of torch: it adds a plain tensor to a DTensor.
    """
    wrapper: Any
    for wrapper in model.modules():
        if hasattr(wrapper, "lora_A") and isinstance(vars(wrapper.get_base_layer()).get("expert_stack"), ShardedStack):
            raise UserError(
                "adapters of experts are not spread by transformers' expert parallelism: load the model without a "
                "DistributedConfig and use ExpertParallel, which spreads both, or adapt attention alone."
            )


def use_toolkit_ep() -> str:
    """Make `DistributedConfig(ep_implementation="toolkit")` known to transformers; returns that name.

    Raises UserError where the installed transformers has no place for it.
    """
    try:
        register_ep_implementation(NAME, ToolkitEP)
    except ImportError:
        import transformers

        raise UserError(
            f"transformers {transformers.__version__} cannot be given an expert-parallel implementation: "
            "use 5.23 or newer, or ExpertParallel under DDP."
        ) from None
    return NAME
