"""When to evaluate, and which metrics become results."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Self

from torch.utils.data import DataLoader

from toolkit.data.batches import EvalBatches
from toolkit.data.loader import AnyEvalBatches, LoaderEvalBatches, make_loader
from toolkit.data.table import TensorTable
from toolkit.run.data import record_data
from toolkit.run.tracking.metric_names import mode_by_name, result_name
from toolkit.train.callbacks.base import Callback
from toolkit.train.callbacks.throughput import Throughput

if TYPE_CHECKING:
    from toolkit.data.table import Batch
    from toolkit.run.run import Run
    from toolkit.train.task import Task
    from toolkit.train.trainer import Trainer


class Evaluation(Callback):
    """Evaluates on `batches` every `every_steps` (None: at the end of each epoch), and after the last step.

    The last metrics become the results `test_loss`, `test_accuracy`, ...; the best ones `best_test_loss`, ...: the
    highest accuracy or F1, the lowest loss or error rate; NaN is the worst. Lists and other metrics have no best. A run
    whose test data are other than before is not continued.

    A second data set has a `name` of its own, which replaces "test", and may have its own `task`. With
    `at_start` there is an evaluation before the first step, too: `test_loss_at_start`, ...
    """

    runs_after = (Throughput,)
    """The time that an evaluation takes would be counted as training."""
    state_attributes = ("_last_step", "_results")

    def __init__(
        self,
        batches: AnyEvalBatches,
        every_steps: int | None = None,
        *,
        name: str = "eval",
        task: Task | None = None,
        at_start: bool = False,
    ):
        self.batches, self.every_steps, self.name, self.task, self.at_start = batches, every_steps, name, task, at_start
        self.prefix = "test" if name == "eval" else name
        if name != "eval":
            self.state_key = name
        self._last_step = -1
        self._results: dict[str, Any] = {}

    @classmethod
    def of(
        cls,
        run: Run,
        data: Any,
        *,
        batch_size: int,
        every: int | None = None,
        name: str = "eval",
        task: Task | None = None,
        at_start: bool = False,
    ) -> Self:
        """Evaluate a table, a data set or a DataLoader, in batches of `batch_size` samples over all ranks; the other
        arguments are those of the class."""
        where: Any = {"rank": run.rank, "world_size": run.world_size, "device": run.device}
        workers = run.config.num_workers
        batches: AnyEvalBatches
        if isinstance(data, TensorTable):
            batches = EvalBatches(data, batch_size=batch_size, num_workers=workers, **where)
        else:
            size = data.batch_size or batch_size if isinstance(data, DataLoader) else batch_size
            loader = make_loader(data, batch_size=size, num_workers=workers, shuffle=False)
            batches = LoaderEvalBatches(loader, seed=run.config.seed, **where)
        return cls(batches, every, name=name, task=task, at_start=at_start)

    def on_fit_start(self, trainer: Trainer) -> None:
        record_data(trainer.run, **{self.state_key or "test": self.batches.identity()})

    def on_step_start(self, trainer: Trainer, micro_batches: list[Batch]) -> None:  # noqa: ARG002
        if self.at_start and trainer.state.step == 0:  # not in `on_fit_start`: a checkpoint may be loaded after that
            self._results |= {
                f"{self.prefix}_{name.partition('/')[2]}_at_start": value
                for name, value in trainer.evaluate(self.batches, f"{self.name}_at_start", self.task).items()
            }

    def on_step_end(self, trainer: Trainer) -> None:
        step = trainer.state.step
        if step % (self.every_steps or trainer.batches.steps_per_epoch) == 0 or step == trainer.max_steps:
            self._evaluate(trainer)

    def on_fit_end(self, trainer: Trainer) -> None:
        if trainer.stop_reason is None and self._last_step != trainer.state.step:
            # Continued from a checkpoint of the last step that was saved before the evaluation.
            self._evaluate(trainer)
        trainer.results |= self._results

    def _evaluate(self, trainer: Trainer) -> None:
        self._last_step = trainer.state.step
        for name, value in trainer.evaluate(self.batches, self.name, self.task).items():
            self._note(result_name(name), value)

    def _note(self, name: str, value: float | list[float]) -> None:
        self._results[name] = value
        mode = mode_by_name(name)
        if isinstance(value, list) or mode is None:
            return
        best = self._results.get(f"best_{name}", math.nan)
        better = value > best if mode == "max" else value < best
        if better or math.isnan(best):
            self._results[f"best_{name}"] = value
