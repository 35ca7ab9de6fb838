"""What transformers' Trainer lacks with experts on several ranks: whole checkpoints, and the load of experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.errors import UserError
from toolkit.experts.layer.stack import expert_stacks
from toolkit.experts.moving.replan import Replanner
from toolkit.experts.routing.metrics import usage_metrics
from toolkit.experts.routing.routing_log import Cursor, take_loads
from toolkit.experts.state import checkpoint_files
from toolkit.experts.state.random_states import random_states, restore_random_states

if TYPE_CHECKING:
    from toolkit.integrations.accelerate.expert_parallel import ExpertParallel

FOLDER = "toolkit"
"""Within each checkpoint of the Trainer."""


class TrainingState:
    """Those events of a `TrainerCallback` at which it adds what Trainer's own checkpoints lack, and restores it; and
    the load of experts since training began or was last asked for.

    Added are parameters, optimizer, scheduler, random states, placement, and the guard of `replanner` where there is
    one. Its checkpoints load on any number of processes. Raises UserError on resuming from a checkpoint outside
    `output_dir` or without these.
    """

    def __init__(self, replanner: Replanner | None) -> None:
        self.replanner = replanner
        self._random: dict[str, Any] | None = None
        """Of the checkpoint that training continues from, until it is restored."""
        self._cursors: list[Cursor] = []

    def load_metrics(self) -> dict[str, float]:
        """Returns `usage_metrics` over all ranks since the last call. A collective, one reduction."""
        return usage_metrics([load_E.cpu().numpy() for load_E in take_loads(self._cursors)])

    def on_train_begin(self, args: Any, state: Any, control: Any, **trainer: Any) -> None:  # noqa: ARG002
        self._cursors = [stack.log.cursor() for stack in expert_stacks(trainer["model"]).values()]
        if state.global_step == 0:
            return
        scheduler, optimizer = trainer["lr_scheduler"], trainer["optimizer"]
        saved = checkpoint_files.load(_checkpoint(args, state) / FOLDER, trainer["model"], optimizer)
        if self.replanner is not None and saved["replanner"] is not None:
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
            restore_random_states(self._random)
            self._random = None

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if self._random is not None:
            restore_random_states(self._random)
            self._random = None

    def on_save(self, args: Any, state: Any, control: Any, **trainer: Any) -> None:  # noqa: ARG002
        replanner = None if self.replanner is None else self.replanner.state_dict()
        content = {"replanner": replanner, "scheduler": trainer["lr_scheduler"].state_dict()}
        checkpoint_files.save(_checkpoint(args, state) / FOLDER, trainer["model"], trainer["optimizer"], content)
        _random_file(args, state).write_text(json.dumps(random_states()))

    def on_train_end(self, args: Any, state: Any, control: Any, **trainer: Any) -> None:  # noqa: ARG002
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            # Trainer leaves out experts that files have under other names than the model, as in most mixtures.
            checkpoint_files.load(Path(state.best_model_checkpoint) / FOLDER, trainer["model"], trainer["optimizer"])


class ExpertTrainingState(TrainingState):
    """The same for a trainer whose model `experts` spreads, which counts steps from those that were resumed.

    Raises UserError when training begins where the trainer did not prepare its model.
    """

    def __init__(self, experts: ExpertParallel) -> None:
        super().__init__(experts.replanner)
        self.experts = experts

    def follow(self, experts: ExpertParallel) -> None:
        """From now on, save and restore the training of `experts`, which spreads another model."""
        self.experts, self.replanner = experts, experts.replanner

    def on_train_begin(self, args: Any, state: Any, control: Any, **trainer: Any) -> None:
        if self.experts.training is None:
            raise UserError(
                "the trainer did not prepare its model by Accelerate, as under torch.nn.DataParallel: start one "
                "process for each GPU, with accelerate launch."
            )
        super().on_train_begin(args, state, control, **trainer)
        self.experts.training.steps = state.global_step


def _checkpoint(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def _random_file(args: Any, state: Any) -> Path:
    return _checkpoint(args, state) / f"random_states-{args.process_index}.json"
