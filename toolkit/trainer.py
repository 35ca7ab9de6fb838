"""The training loop. Read `fit`, then `train_step`; the rest is where their parts come from.

The trainer knows parameters, not models: it never hears of experts. That some parameters are owned by one rank is
handled by four functions of `toolkit.parallel.ownership`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from toolkit.callbacks.base import HOOKS, Callback
from toolkit.checkpoint import checkpoint
from toolkit.data.batches import EvalBatches, TrainBatches
from toolkit.metrics import MetricSums
from toolkit.parallel.gradients import average_owned_gradients, clip_grad_norm_, refresh_replicas
from toolkit.parallel.ownership import owned
from toolkit.parallel.prepare import prepare, refuse_late_parameters
from toolkit.run.run import Run
from toolkit.schedules import Schedule
from toolkit.seeding import seed_device
from toolkit.state import TrainState
from toolkit.task import Batch, Loss, Task


class Trainer:
    """Trains `model` on `task`, one optimizer step after another, until `max_steps`.

    `model` and `optimizer` come as the recipe built them; Accelerate places and wraps them here. `schedule` maps a
    step to a multiplier of each parameter group's initial learning rate.
    """

    def __init__(
        self,
        run: Run,
        task: Task,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        batches: TrainBatches,
        *,
        max_steps: int,
        schedule: Schedule,
        max_grad_norm: float | None = 1.0,
        log_every: int = 50,
        callbacks: Sequence[Callback] = (),
    ):
        self.run, self.task, self.batches, self.schedule = run, task, batches, schedule
        self.max_steps, self.max_grad_norm, self.log_every = max_steps, max_grad_norm, log_every
        self.base_rates = [group["lr"] for group in optimizer.param_groups]
        if batches.accumulation != (made_for := run.accelerator.gradient_accumulation_steps):
            raise ValueError(f"{batches.accumulation} micro-batches per step in a run that was made for {made_for}")
        self.raw_model = model
        self.model, self.optimizer = prepare(run.accelerator, model, optimizer, dense=run.config.dense_parallel)
        # Accelerate's wrappers know when to skip a step of fp16, and cast. Where there is nothing to do they still look
        # for a package on the disk and for variables in the environment, twice a step: a tenth of a small model's step.
        self.update = self.optimizer.step if run.accelerator.scaler is not None else optimizer.step
        self.autocast = run.accelerator.autocast if run.accelerator.mixed_precision != "no" else nullcontext
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.owned_parameters = owned(self.parameters)
        self.state = TrainState()
        self.sums = MetricSums(run.device)
        self.results: dict[str, Any] = {}
        """The run's final numbers; callbacks add to them, `fit` returns them."""
        self.stop_reason: str | None = None
        self._recorded: dict[str, Any] = {}
        self._line_is_due = False
        self.callbacks = list(callbacks)
        self._hooks = {
            name: [getattr(c, name) for c in callbacks if getattr(type(c), name) is not getattr(Callback, name)]
            for name in HOOKS
        }

    # --- the loop ---------------------------------------------------------------------------------------------

    def fit(self) -> dict[str, Any]:
        """Train from `state.step` to `max_steps`, or until a callback calls `request_stop`; returns `results`."""
        try:
            self.run.begin_tracking()
            self.hooks("on_fit_start")
            self.model.train()
            steps = self.batches.steps(self.state.step)
            while self.state.step < self.max_steps and self.stop_reason is None:
                self.train_step(next(steps))
                self.hooks("on_step_end")
                if self.at_log_step or self._line_is_due:
                    self.emit()
            self.hooks("on_fit_end")
        except BaseException as error:
            self.hooks("on_exception", error)
            raise
        return self.results

    def train_step(self, micro_batches: list[Batch]) -> None:
        """Learn from the batch of this step, and count it."""
        multiplier = self.schedule(self.state.step)
        self.hooks("on_step_start", micro_batches)
        norm = self.learn(micro_batches, multiplier)
        self.state.step += 1
        self.state.samples = self.batches.order.samples_before(self.state.step)
        if self.at_log_step:
            self.record("train/grad_norm", norm)
            self.record("train/learning_rate", self.base_rates[0] * multiplier)

    def learn(self, micro_batches: list[Batch], multiplier: float) -> Tensor:
        """Forward and backward of each micro-batch, one synchronisation, one update; returns the gradients' norm."""
        accelerator = self.run.accelerator
        counts, total = self.global_counts(micro_batches)
        for group, rate in zip(self.optimizer.param_groups, self.base_rates, strict=True):
            group["lr"] = rate * multiplier
        # DDP takes the mean over ranks and Accelerate divides by the accumulation steps: undo both, divide once.
        scale = self.run.world_size * len(micro_batches) / total
        for index, batch in enumerate(micro_batches):
            self.seed_micro_batch(index)
            with accelerator.accumulate(self.model):
                with self.autocast():
                    loss = self.task.loss(self.model, batch)
                value = loss.sum if loss.penalty is None else loss.sum + loss.penalty * counts[index]
                accelerator.backward(value * scale)
            self.record_sums(loss, counts[index])
        accelerator.unscale_gradients()
        average_owned_gradients(self.owned_parameters, self.run.world_size)
        norm = clip_grad_norm_(self.parameters, self.max_grad_norm)
        self.hooks("on_before_optimizer_step")
        self.update()
        refresh_replicas(self.owned_parameters)
        for parameter in self.parameters:
            parameter.grad = None
        return norm

    def seed_micro_batch(self, index: int) -> None:
        """Address the random draws of the coming forward pass by (seed, step, micro-batch, rank)."""
        seed_device(self.run.device, self.run.seed, "step", self.state.step, index, self.run.rank)

    def global_counts(self, micro_batches: list[Batch]) -> tuple[Sequence[Any] | Tensor, Any]:
        """The count of each micro-batch over all ranks, and their sum, known before the first backward."""
        counts = [self.task.count(batch) for batch in micro_batches]
        if self.run.world_size == 1:
            return counts, sum(counts)
        reduced = torch.tensor(counts, dtype=torch.float64, device=self.run.device)
        dist.all_reduce(reduced)
        return reduced, reduced.sum()

    @torch.no_grad()
    def evaluate(self, batches: EvalBatches, name: str = "eval") -> dict[str, float]:
        """Means over all of `batches` and all ranks, or what the task makes of them, named `name/...`; each sample
        counts once."""
        sums = MetricSums(self.run.device)
        self.model.eval()
        for batch in batches:
            with self.autocast():
                loss = self.task.evaluate(self.model, batch)
            sums.add({"loss": loss.sum, **loss.sums}, loss.count)
        self.model.train()
        summarise = getattr(self.task, "summarise", dict)
        metrics = {f"{name}/{key}": value for key, value in summarise(sums.compute()).items()}
        for key, value in metrics.items():
            self.record(key, value)
        self._line_is_due = True
        self.hooks("on_evaluate_end", name, metrics)
        return metrics

    # --- what callbacks use -----------------------------------------------------------------------------------

    def hooks(self, name: str, *args: Any) -> None:
        """Call hook `name` of every callback that has it."""
        for hook in self._hooks[name]:
            hook(self, *args)

    def request_stop(self, reason: str) -> None:
        """End training after this step. To be called on all ranks alike."""
        self.stop_reason = reason

    def record(self, name: str, value: Any) -> None:
        """Put `value` (a number, or a tensor that is equal on all ranks) on the next line of metrics."""
        self._recorded[name] = value

    @property
    def at_log_step(self) -> bool:
        """Whether the step that just ended closes a line of metrics: the one moment that waits for the device."""
        step = self.state.step
        return step % self.log_every == 0 or step % self.batches.steps_per_epoch == 0 or step == self.max_steps

    # --- metrics and state ------------------------------------------------------------------------------------

    def record_sums(self, loss: Loss, global_count: Any) -> None:
        self.sums.add({"loss": loss.sum, **loss.sums}, loss.count)
        if loss.penalty is not None:
            # Shares add up over ranks to one mean per micro-batch, which weighs as much as its samples.
            self.sums.add({"penalty": loss.penalty * global_count}, loss.count)

    def emit(self) -> None:
        """Write one line of metrics: means since the last line, and what was recorded."""
        refuse_late_parameters(self.raw_model, self.parameters)
        means = {f"train/{name}": value for name, value in self.sums.compute().items()}
        self.sums.reset()
        recorded, self._recorded, self._line_is_due = self._plain_records(), {}, False
        epoch = self.state.step / self.batches.steps_per_epoch
        self.run.log({"train/epoch": epoch, **means, **recorded}, self.state.step)

    def _plain_records(self) -> dict[str, Any]:
        return {k: v.item() if isinstance(v, Tensor) and v.ndim == 0 else v for k, v in self._recorded.items()}

    def save(self, keep: int = 2) -> Path | None:
        """Write a checkpoint, and delete all but the newest `keep`; None where it could not be written. A collective.

        For the time between two steps: when `on_step_start` is called, or once training has ended.
        """
        folder = checkpoint.save_checkpoint(
            self.run.checkpoints,
            model=self.raw_model,
            optimizer=self.optimizer,
            state=self.state_dict(),
            keep=keep,
            run=self.run,
        )
        if folder is not None:
            self.hooks("on_save", folder)
        return folder

    def restore(self, folder: Path) -> None:
        """Continue from the checkpoint in `folder`. A collective; raises UserError where it does not fit."""
        saved = checkpoint.load_checkpoint(folder, model=self.raw_model, optimizer=self.optimizer, run=self.run)
        self.load_state_dict(saved)

    def state_dict(self) -> dict[str, Any]:
        """Everything but weights and optimizer rows, as plain JSON values. A collective."""
        return {
            "step": self.state.step,
            "samples": self.state.samples,
            "metric_sums": self.sums.state_dict(),
            "recorded": self._plain_records(),
            "results": self.results,
            "callbacks": {type(c).__name__: c.state_dict() for c in self.callbacks},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        self.state = TrainState(step=state["step"], samples=state["samples"])
        self.sums.load_state_dict(state["metric_sums"])
        self._recorded, self.results = dict(state["recorded"]), dict(state["results"])
        for callback in self.callbacks:
            if saved := state["callbacks"].get(type(callback).__name__):
                callback.load_state_dict(saved)
