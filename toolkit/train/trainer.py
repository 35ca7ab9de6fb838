"""The training loop. Read `fit`, then `train_step`, then `learn`.

The trainer knows parameters, not models. `ExpertSync` owns the optimizer step, and handles parameters that only some
ranks own, such as experts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from toolkit.checkpoint import checkpoint
from toolkit.checkpoint.background import Write
from toolkit.data.batches import TrainBatches
from toolkit.data.loader import AnyEvalBatches, LoaderBatches
from toolkit.data.table import Batch
from toolkit.errors import UserError
from toolkit.experts.layer.losses import RouterPenalty
from toolkit.experts.layer.moe_layer import Experts
from toolkit.experts.parallel.ddp import refuse_late_parameters
from toolkit.experts.parallel.seeding import seed_device
from toolkit.experts.parallel.sync import ExpertSync
from toolkit.experts.parallel.waits import waits
from toolkit.experts.state.tensor_files import ToCPU, on_cpu
from toolkit.integrations.accelerate.prepare import prepare
from toolkit.run.data import record_data
from toolkit.run.launch.signals import HANDLED
from toolkit.run.run import Run
from toolkit.train.callbacks.base import OF_A_STEP, Callback, check_callbacks, hooks_of, load_states, states_of
from toolkit.train.finite_check import FiniteCheck
from toolkit.train.metrics import MetricSums, global_counts, plain_values
from toolkit.train.optim import Schedule, Scheduler, SteppedRates, check_optimization, initial_rates
from toolkit.train.task import Loss, Task, as_loss

STOP_NAMES = {number.name for number in HANDLED}


@dataclass(slots=True)
class TrainState:
    """How far a run has come, saved in each checkpoint: two integers, from which the config determines the rest."""

    step: int = 0
    """Optimizer steps done. Also the position in the data: see `toolkit.data.batches`."""
    samples: int = 0
    """Training samples seen over all ranks."""


class Trainer:
    """Trains `model` on `task` until `max_steps` optimizer steps.

    Args:
        run: The result of `start_run`.
        task: Defines the loss.
        model: As the recipe built it; Accelerate prepares it here.
        optimizer: The recipe's, of `model`'s parameters; Accelerate prepares it here.
        batches: Which samples make up which step.
        max_steps: Total optimizer steps of the run.
        schedule: Maps a step to a multiplier of each parameter group's initial learning rate; or a scheduler that was
            made for `optimizer`, which is stepped after each optimizer step and saved with checkpoints.
        schedule_metric: A metric of an evaluation, such as `eval/loss`, with which the scheduler is stepped instead.
        max_grad_norm: Gradients are clipped to this norm; None: not at all.
        log_every: Optimizer steps between log steps.
        penalty: Router losses that are added to the loss of any task.
        callbacks: Callbacks, called in this order.

    Raises:
        ValueError: For callbacks in a wrong order, or two with one `state_key`.
        UserError: If every rate is 0, the optimizer lacks a trainable parameter, or Accelerate or DDP has the model or
            the scheduler already.
    """

    def __init__(
        self,
        run: Run,
        task: Task,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        batches: TrainBatches | LoaderBatches,
        *,
        max_steps: int,
        schedule: Schedule | Scheduler,
        schedule_metric: str | None = None,
        max_grad_norm: float | None = 1.0,
        log_every: int = 50,
        penalty: RouterPenalty | None = None,
        callbacks: Sequence[Callback] = (),
    ):
        check_optimization(model, optimizer, schedule)
        self.run, self.task, self.batches, self.penalty = run, task, batches, penalty
        self.scheduler = SteppedRates(schedule, schedule_metric) if isinstance(schedule, Scheduler) else None
        self.schedule = None if isinstance(schedule, Scheduler) else schedule
        self.max_steps, self.max_grad_norm, self.log_every = max_steps, max_grad_norm, log_every
        self.base_rates = initial_rates(optimizer)
        if batches.accumulation != (made_for := run.accumulation):
            raise ValueError(f"{batches.accumulation} micro-batches per step in a run that was made for {made_for}")
        self.raw_model = model
        self.model, self.optimizer = prepare(run.accelerator, model, optimizer)
        self.sync = ExpertSync(model, optimizer, prepared=self.model)
        self.experts = Experts.of(model)
        """The layers with experts, for callbacks."""
        # Accelerate's wrappers skip steps of fp16 and autocast. If neither is needed they still look for a package
        # on disk and for environment variables, twice a step: a tenth of a small model's step time.
        self.update = self.optimizer.step if run.accelerator.scaler is not None else optimizer.step
        self.autocast = run.accelerator.autocast if run.accelerator.mixed_precision != "no" else nullcontext
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.micro_batches: list[Batch] = []
        """Micro-batches of the last step, on this rank."""
        self.finite = FiniteCheck(self)
        self.state = TrainState()
        self.sums = MetricSums(run.device)
        self.results: dict[str, Any] = {}
        """Result of `fit`; callbacks add to it."""
        self.stop_reason: str | None = None
        self.phase, self.phase_began = "start", time.monotonic()
        """Phase of this rank (start, data, step, callbacks, evaluation, checkpoint, fit end, finish), and its start on
        this rank's clock, for phases of a step the start of the step; "end" after `fit` and `Run.finish`."""
        self._recorded: dict[str, Any] = {}
        self._line_is_due = False
        self._weights_for: Literal["train", "eval"] = "train"
        check_callbacks(callbacks)
        self.callbacks = list(callbacks)
        self._hooks = hooks_of(callbacks)
        self.call_hooks("on_init")

    # --- the loop ---------------------------------------------------------------------------------------------

    def fit(self) -> dict[str, Any]:
        """Train from `state.step` to `max_steps`, or until a callback calls `request_stop`.

        Returns:
            `results`.

        Raises:
            UserError: On every rank, if a run is continued on other data, or a loss, a gradient or a weight is not
                finite: in the same step on a CPU, elsewhere at the next log step or checkpoint.
        """
        self.enter("start")
        self.sync.follow()
        try:
            record_data(self.run, train=self.batches.identity())
            self.call_hooks("on_fit_start")
            self.run.begin(self.state.step)
            self.model.train()
            self.use_weights_for("train")
            steps = self.batches.steps(self.state.step)
            while self.state.step < self.max_steps and self.stop_reason is None:
                self.enter("data")
                self.train_step(next(steps))
                self.call_hooks("on_step_end")
                if self.at_log_step or self._line_is_due:
                    self.emit()
            self.finite.read()
            self.enter("fit end")
            if not self.is_preempted:
                self.use_weights_for("eval")
            self.call_hooks("on_fit_end")
            self.enter("end")
        except BaseException as error:
            self.call_hooks("on_exception", error)
            raise
        finally:
            self.sync.close()
        return self.results

    def train_step(self, micro_batches: list[Batch]) -> None:
        """One optimizer step on the micro-batches of a global batch, with its hooks; advances `state`."""
        self.enter("callbacks")
        multiplier = None if self.schedule is None else self.schedule(self.state.step)
        self.call_hooks("on_step_start", micro_batches)
        norm = self.learn(micro_batches, multiplier)
        rate = self.optimizer.param_groups[0]["lr"]
        if self.scheduler is not None:
            self.scheduler.after_step()
        self.state.samples += self.batches.samples_of(self.state.step)
        self.state.step += 1
        self.sync.after_step(self.state.step, self.optimizer)
        if self.at_log_step:
            self.record("train/grad_norm", norm)
            if skipped := self.results.get("skipped_steps"):
                self.record("train/skipped_steps", skipped)
            self.record("train/learning_rate", rate)

    def learn(self, micro_batches: list[Batch], multiplier: float | None, *, record: bool = True) -> Tensor:
        """Forward and backward of each micro-batch, one gradient synchronisation, one optimizer step, which is not
        counted; returns the gradients' norm before clipping. Rates are the initial ones times `multiplier`; None leaves
        them as a scheduler set them. `record` False leaves the loss out of the metrics."""
        self.enter("step")
        self.micro_batches = micro_batches
        self.call_hooks("on_before_forward")
        accelerator = self.run.accelerator
        counted = [self.task.count(batch) for batch in micro_batches]
        counts, total = waits.timed("counts", self.run.device, global_counts, counted, self.run.device)
        if multiplier is not None:
            for group, rate in zip(self.optimizer.param_groups, self.base_rates, strict=True):
                group["lr"] = rate * multiplier
        # DDP averages over ranks and Accelerate divides by the accumulation steps: undo both, divide by the count.
        scale = self.run.world_size * len(micro_batches) / total
        losses: list[Tensor] = []
        parts: list[tuple[Loss, Any]] = []
        for index, batch in enumerate(micro_batches):
            self.seed_micro_batch(index)
            with accelerator.accumulate(self.model):
                with self.autocast():
                    loss = self.loss(batch)
                value = loss.sum if loss.penalty is None else loss.sum + loss.penalty * counts[index]
                accelerator.backward(value * scale)
            losses.append(value.detach())
            parts.append((loss, counts[index]))
        accelerator.unscale_gradients()
        norm = self.sync.clip(self.parameters, self.max_grad_norm, take_norms=self.finite.take_norms)
        if self.finite.add(self.state.step + 1, norm, losses):
            self.call_hooks("on_before_optimizer_step")
            self.update()
            for part in parts if record else ():
                self.record_sums(*part)
        else:
            self.results["skipped_steps"] = self.results.get("skipped_steps", 0) + 1
        for parameter in self.parameters:
            parameter.grad = None
        self.enter("callbacks")
        return norm

    def loss(self, batch: Batch) -> Loss:
        """Return the task's training loss with the router losses. A collective if there are any."""
        loss = as_loss(self.task.loss(self.model, batch), "loss")
        share = None if self.penalty is None else self.penalty.share()
        if share is None:
            return loss
        return replace(loss, penalty=share if loss.penalty is None else loss.penalty + share)

    def seed_micro_batch(self, index: int) -> None:
        """Seed the device for the next forward pass by (seed, step, micro-batch, rank)."""
        seed_device(self.run.device, self.run.seed, "step", self.state.step, index, self.run.rank)

    @torch.no_grad()
    def evaluate(self, batches: AnyEvalBatches, name: str = "eval", task: Task | None = None) -> dict[str, float]:
        """Return means, or `task.summarise` of the means, as `name/...`. A collective; UserError if empty."""
        sums = MetricSums(self.run.device)
        task, before, weights = task or self.task, self.phase, self._weights_for
        self.model.eval()
        self.use_weights_for("eval")
        for batch in batches:
            self.enter("evaluation")
            with self.autocast():
                loss = as_loss(task.evaluate(self.model, batch), "evaluate")
            sums.add({"loss": loss.sum, **loss.sums}, loss.count)
        self.model.train()
        self.use_weights_for(weights)
        summarise = getattr(task, "summarise", dict)
        metrics = {f"{name}/{key}": value for key, value in summarise(sums.of_evaluation(name)).items()}
        self._recorded |= metrics
        self._line_is_due = True
        if self.scheduler is not None:
            self.scheduler.after_evaluation(metrics)
        self.call_hooks("on_evaluate_end", name, metrics)
        self.enter(before)
        return metrics

    # --- API for callbacks ------------------------------------------------------------------------------------

    def call_hooks(self, name: str, *args: Any) -> None:
        """Call hook `name` of every callback that overrides it."""
        for hook in self._hooks[name]:
            hook(self, *args)

    def enter(self, phase: str) -> None:
        """Note that `phase` begins, for threads that watch the run."""
        if phase == "data" or not {self.phase, phase} <= OF_A_STEP:
            self.phase_began = time.monotonic()
        self.phase = phase

    def use_weights_for(self, mode: Literal["train", "eval"]) -> None:
        """Have a schedule-free optimizer put its training or evaluation weights into the model.

        Other optimizers have one set of weights. The last checkpoint of a run has evaluation weights, others have
        training weights, with which a run resumes exactly.
        """
        getattr(self.optimizer, mode)()
        self._weights_for = mode

    @property
    def is_preempted(self) -> bool:
        """Whether a signal ended training before its last step."""
        return self.stop_reason in STOP_NAMES and self.state.step < self.max_steps

    def request_stop(self, reason: str) -> None:
        """Stop training after this step. Call it on all ranks."""
        self.stop_reason = reason

    def record(self, name: str, value: Any) -> None:
        """Add `value` (a number, or a tensor that is equal on all ranks) to the next log step."""
        self._recorded[name] = value

    @property
    def at_log_step(self) -> bool:
        """Whether the step that just ended is a log step. Only then does the host wait for the device."""
        step = self.state.step
        return step % self.log_every == 0 or step % self.batches.steps_per_epoch == 0 or step == self.max_steps

    # --- metrics and state ------------------------------------------------------------------------------------

    def record_sums(self, loss: Loss, global_count: Any) -> None:
        """Add a micro-batch, whose count over all ranks is `global_count`, to the means of the next log step."""
        self.sums.add({"loss": loss.sum, **loss.sums}, loss.count)
        if loss.penalty is not None:
            # Ranks' shares add up to one mean per micro-batch, which is weighted by the micro-batch's count.
            self.sums.add({"penalty": loss.penalty * global_count}, loss.count)

    def emit(self) -> None:
        """Write one log step: means since the last log step, and recorded values."""
        refuse_late_parameters(self.raw_model, self.parameters)
        self.sync.check(self.state.step)
        means = {f"train/{name}": value for name, value in self.sums.compute().items()}
        self.finite.check_line(self.state.step, means)
        self.sums.reset()
        means["train/epoch"] = self.state.step / self.batches.steps_per_epoch
        self.run.log({**means, **plain_values(self._recorded)}, self.state.step)
        self._recorded = {}
        self._line_is_due = False

    def save(self, keep: int = 2) -> Path | None:
        """Write a checkpoint and delete all but the newest `keep`; None if it could not be written. A collective,
        to be called between two steps: from `on_step_start`, or after training. Raises UserError, and writes and
        deletes nothing, if weights are not finite."""
        before = self.phase
        folder = self.begin_save(keep)(None)
        if folder is not None:
            self.call_hooks("on_save", folder)
        self.enter(before)
        return folder

    def begin_save(self, keep: int, to_cpu: ToCPU = on_cpu) -> Write:
        """Collect the data for `save`: see `toolkit.checkpoint.checkpoint.begin_checkpoint`."""
        self.enter("checkpoint")
        self.finite.check_weights(self.state.step)
        self.sync.check(self.state.step)
        return checkpoint.begin_checkpoint(
            self.run.checkpoints,
            model=self.raw_model,
            optimizer=self.optimizer,
            state=self.state_dict(),
            keep=keep,
            run=self.run,
            to_cpu=to_cpu,
        )

    def restore(self, folder: Path) -> dict[str, Any]:
        """Continue from the checkpoint in `folder`; returns its `state_dict`. A collective; raises UserError if it
        does not fit."""
        saved = checkpoint.load_checkpoint(folder, model=self.raw_model, optimizer=self.optimizer, run=self.run)
        self.load_state_dict(saved)
        return saved

    def state_dict(self) -> dict[str, Any]:
        """Everything but weights and optimizer states, as plain JSON values. A collective."""
        return {
            "step": self.state.step,
            "samples": self.state.samples,
            "metric_sums": self.sums.state_dict(),
            "recorded": plain_values(self._recorded),
            "results": self.results,
            "callbacks": states_of(self.callbacks),
            "metrics": self.run.seal_of_metrics(),
            **({} if self.scheduler is None else {"schedule": self.scheduler.state_dict()}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of `state_dict`. Raises UserError if only one of the two runs has a scheduler of its own."""
        if ("schedule" in state) != (self.scheduler is not None):
            has = "the" if "schedule" in state else "no"
            raise UserError(
                f"schedule: the checkpoint has {has} state of a scheduler. Pass the schedule of the run that saved it."
            )
        self.state = TrainState(step=state["step"], samples=state["samples"])
        self.sums.load_state_dict(state["metric_sums"])
        self._recorded = dict(state["recorded"])
        self.results = dict(state["results"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["schedule"])
        load_states(self.callbacks, state["callbacks"])
