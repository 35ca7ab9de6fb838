"""Moving experts under transformers' own expert parallelism in its Trainer, and resuming such a training."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.tensor import DTensor

from toolkit.errors import UserError
from toolkit.experts.hosts.loop.engine import describe_balance
from toolkit.experts.hosts.transformers.toolkit_ep import refuse_adapters
from toolkit.experts.hosts.transformers.training_state import TrainingState
from toolkit.experts.layer.stack import expert_stacks
from toolkit.experts.moving.replan import Replanner
from toolkit.experts.moving.replan_options import ReplanOptions
from toolkit.experts.parallel.optimizer_rows import refuse_coupled_rows
from toolkit.experts.parallel.ownership import spread_like

if TYPE_CHECKING:
    from transformers import TrainerCallback


def replan_callback(options: ReplanOptions) -> TrainerCallback:
    """Returns a callback of transformers' Trainer that moves experts between steps.

    Its `replanner` is a `toolkit.experts.moving.replan.Replanner`. Trainer does not resume models that were sharded
    when they were loaded. With this callback it does: pass `save_only_model=True`, and the callback adds parameters,
    optimizer, scheduler, random states, placement and guard to each checkpoint, and restores them after
    `trainer.train(resume_from_checkpoint=...)`. Rank 0 prints which balance penalty is active when training begins.

    Args:
        options: When experts are moved, and by which planner.

    Raises:
        UserError: On resuming from a checkpoint outside `output_dir` or without these; for a model whose experts cannot
            move, as under DDP alone, or have adapters; and for two balance penalties.
    """
    from transformers import TrainerCallback

    replanner = Replanner({}, options)

    class Replan(TrainingState, TrainerCallback):
        replanner: Replanner

        def on_init_end(self, args: Any, state: Any, control: Any, **trainer: Any) -> None:  # noqa: ARG002
            refuse_adapters(trainer["model"])
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

    return Replan(replanner)


def _distribute(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before whole tensors are loaded into parameters that are sharded: shard them alike."""
    for name, parameter in module.named_parameters(recurse=False):
        value = state.get(prefix + name)
        if isinstance(parameter, DTensor) and value is not None and not isinstance(value, DTensor):
            state[prefix + name] = spread_like(parameter, value)
