"""Moving experts under transformers' Trainer, and resuming such a training."""

from __future__ import annotations

import base64
import json
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from toolkit.checkpoint.checkpoint import load_tensors, save_tensors
from toolkit.errors import UserError
from toolkit.hosts.balance import describe_balance
from toolkit.hosts.transformers.host import refuse_adapters
from toolkit.moe.replan import Replanner
from toolkit.moe.stack import expert_stacks
from toolkit.parallel.optimizer_rows import refuse_coupled_rows

if TYPE_CHECKING:
    from transformers import TrainerCallback

    from toolkit.placement.planners import Planner

FOLDER = "toolkit"
"""Within each checkpoint of the Trainer."""


def replan_callback(
    planner: str | Planner,
    *,
    every: int,
    guarded: bool = True,
    link_gbytes_per_second: float | None = 10.0,
    expert_time_share: float = 0.5,
    **options: Any,
) -> TrainerCallback:
    """For transformers' Trainer: after each `every` steps, move experts where `planner` wants them for the load since.

    The arguments are those of `toolkit.moe.replan.Replanner`, which the callback has as its `replanner`; `options` are
    the planner's.

    Trainer does not resume models that were sharded when they were loaded. With this callback it does: pass
    `save_only_model=True`, and the callback adds parameters, optimizer, scheduler, random states, placement and guard
    to each checkpoint, and restores them after `trainer.train(resume_from_checkpoint=...)`.

    Raises UserError for an unknown planner, on resuming from a checkpoint outside `output_dir` or without these, and
    for a model whose experts cannot move, as under DDP alone, or have adapters, and for two balance penalties. Rank 0
    prints which one is active when training begins.
    """
    from transformers import TrainerCallback

    replanner = Replanner(
        {},
        planner=planner,
        every=every,
        guarded=guarded,
        link_gbytes_per_second=link_gbytes_per_second,
        expert_time_share=expert_time_share,
        options=options,
    )

    class Replan(TrainerCallback):
        def __init__(self) -> None:
            self.replanner = replanner
            self._random: dict[str, Any] | None = None
            """Of the checkpoint that training continues from, until it is restored."""

        def on_init_end(self, args: Any, state: Any, control: Any, **trainer: Any) -> None:  # noqa: ARG002
            refuse_adapters(trainer["model"])
            for module in trainer["model"].modules():
                if any(isinstance(parameter, DTensor) for parameter in module.parameters(recurse=False)):
                    module.register_load_state_dict_pre_hook(_distribute)

        def on_train_begin(self, args: Any, state: Any, control: Any, **trainer: Any) -> None:  # noqa: ARG002
            model, optimizer, scheduler = trainer["model"], trainer["optimizer"], trainer["lr_scheduler"]
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
            refuse_coupled_rows(optimizer)
            self.replanner.watch(stacks)
            if state.global_step == 0:
                return
            saved = load_tensors(_folder(args, state), model, optimizer)
            self.replanner.load_state_dict(saved["replanner"])
            scheduler.load_state_dict(saved["scheduler"])
            for group, rate in zip(optimizer.param_groups, scheduler.get_last_lr(), strict=True):
                group["lr"] = rate
            file = _random_file(args, state)
            self._random = json.loads(file.read_text()) if file.exists() else None  # fewer ranks wrote it
            self._mid_epoch = abs(state.epoch - round(state.epoch)) > 1e-6

        # Random states are restored where Trainer restores its own: at the start of an epoch, or after the batches of
        # a begun one were skipped, so that the data loader draws from them as it did.
        def on_epoch_begin(self, *_: Any, **__: Any) -> None:
            if self._random is not None and not self._mid_epoch:
                _restore(self._random)
                self._random = None

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if self._random is not None:
                _restore(self._random)
                self._random = None

        def on_step_end(self, args: Any, state: Any, control: Any, **trainer: Any) -> None:  # noqa: ARG002
            self.replanner.after_step(state.global_step, trainer["optimizer"])

        def on_save(self, args: Any, state: Any, control: Any, **trainer: Any) -> None:  # noqa: ARG002
            content = {"replanner": self.replanner.state_dict(), "scheduler": trainer["lr_scheduler"].state_dict()}
            folder = _folder(args, state)
            save_tensors(folder, trainer["model"], trainer["optimizer"], content)
            _random_file(args, state).write_text(json.dumps(_random_states()))

    return Replan()


def _folder(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}" / FOLDER


def _distribute(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before whole tensors are loaded into parameters that are sharded: shard them alike."""
    for name, parameter in module.named_parameters(recurse=False):
        value = state.get(prefix + name)
        if isinstance(parameter, DTensor) and value is not None and not isinstance(value, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            state[prefix + name] = distribute_tensor(value.to(parameter.device), mesh, placements, src_data_rank=None)


def _random_file(args: Any, state: Any) -> Path:
    return _folder(args, state).parent / f"random_states-{args.process_index}.json"


def _random_states() -> dict[str, Any]:
    """The states of all generators of this process, as JSON values."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    devices = torch.cuda.random.get_rng_state_all() if torch.cuda.is_available() else []
    return {
        "python": random.getstate(),
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
        "torch": [base64.b64encode(bytes(s.tolist())).decode() for s in (torch.random.get_rng_state(), *devices)],
    }


def _restore(states: dict[str, Any]) -> None:
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(tuple(states["numpy"]))
    cpu, *devices = [torch.tensor(list(base64.b64decode(s)), dtype=torch.uint8) for s in states["torch"]]
    torch.random.set_rng_state(cpu)
    if torch.cuda.is_available() and len(devices) == torch.cuda.device_count():
        torch.cuda.random.set_rng_state_all(devices)
