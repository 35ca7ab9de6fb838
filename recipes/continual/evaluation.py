"""The accuracy on every task after each of them, and the scores of continual learning that follow from it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from toolkit.data.batches import EvalBatches
from toolkit.train.callbacks.base import Callback
from toolkit.train.callbacks.throughput import Throughput

if TYPE_CHECKING:
    from toolkit.data.table import Batch, TensorTable
    from toolkit.train.trainer import Trainer


@dataclass(frozen=True)
class AccuracyMatrix:
    """Held-out accuracies of T tasks, as fractions."""

    before: Sequence[float]
    """(T,): on each task before anything was learned."""
    after: Sequence[Sequence[float]]
    """(T, T): row i on each task after task i was learned."""

    def __post_init__(self) -> None:
        lengths = {len(self.before), len(self.after), *map(len, self.after)}
        if len(lengths) != 1 or len(self.before) < 2:
            raise ValueError(f"accuracies of two tasks or more after each of them are needed, got {self.after}")

    @property
    def average_accuracy(self) -> float:
        """Over all tasks, after the last."""
        return statistics.mean(self.after[-1])

    @property
    def forgetting(self) -> float:
        """Mean over all tasks but the last: the best accuracy before the last task was learned, less that after it
        (Chaudhry et al. 2018, arXiv 1801.10112, eq. 3). Below zero where the last task helped the others."""
        *earlier, last = self.after
        best = [max(column) for column in zip(*earlier, strict=True)]
        return statistics.mean(b - now for b, now in zip(best[:-1], last[:-1], strict=True))

    @property
    def forward_transfer(self) -> float:
        """Mean over all tasks but the first: the accuracy just before the task was learned, less that before anything
        was (Lopez-Paz & Ranzato 2017, arXiv 1706.08840, eq. 4)."""
        tasks = range(1, len(self.before))
        return statistics.mean(self.after[task - 1][task] - self.before[task] for task in tasks)

    @property
    def learning_accuracy(self) -> float:
        """Mean over tasks of the accuracy right after each was learned: how well it still learns."""
        return statistics.mean(row[task] for task, row in enumerate(self.after))

    def scores(self) -> dict[str, float]:
        """All of the above."""
        names = ("average_accuracy", "forgetting", "forward_transfer", "learning_accuracy")
        return {name: getattr(self, name) for name in names}


class TaskEvaluation(Callback):
    """Evaluates on the held-out table of each task before the first step and at each of `task_ends` (in steps).

    The metrics are eval/task0/accuracy, eval/task0/loss, ...; after the last task the results get `accuracy_before`,
    `accuracy_matrix` and the scores of `AccuracyMatrix`. `batch_size` is over all ranks. With `every_steps`, the
    config's `eval_every_steps`, metrics come within tasks, too: how fast a task is learned and others are forgotten.
    """

    runs_after = (Throughput,)

    def __init__(
        self,
        tests: Sequence[TensorTable],
        task_ends: Sequence[int],
        *,
        batch_size: int = 1000,
        every_steps: int | None = None,
    ):
        self.tests, self.every_steps = list(tests), every_steps
        self.task_ends = list(task_ends)
        self.batch_size = batch_size
        self._before: list[float] = []
        self._after: list[list[float]] = []

    def on_step_start(self, trainer: Trainer, micro_batches: list[Batch]) -> None:  # noqa: ARG002
        if trainer.state.step == 0:
            self._before = self._evaluate(trainer)

    def on_step_end(self, trainer: Trainer) -> None:
        # A checkpoint that was taken after a task's end has its row already.
        if trainer.state.step in self.task_ends[len(self._after) :]:
            self._after.append(self._evaluate(trainer))
        elif self.every_steps is not None and trainer.state.step % self.every_steps == 0:
            self._evaluate(trainer)

    def on_fit_end(self, trainer: Trainer) -> None:
        if len(self._after) == len(self.task_ends):
            matrix = AccuracyMatrix(self._before, self._after)
            trainer.results |= {"accuracy_before": self._before, "accuracy_matrix": self._after} | matrix.scores()

    def _evaluate(self, trainer: Trainer) -> list[float]:
        run, accuracies = trainer.run, []
        for task, table in enumerate(self.tests):
            batches = EvalBatches(
                table,
                batch_size=self.batch_size,
                rank=run.rank,
                world_size=run.world_size,
                device=run.device,
                num_workers=run.config.num_workers,
            )
            name = f"eval/task{task}"
            accuracies.append(trainer.evaluate(batches, name)[f"{name}/accuracy"])
        return accuracies

    def state_dict(self) -> dict[str, Any]:
        return {"before": self._before, "after": self._after}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._before = list(state["before"])
        self._after = [list(row) for row in state["after"]]
