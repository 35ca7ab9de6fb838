"""The accuracy on every task after each of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from continual.scores import AccuracyMatrix
from toolkit.data.batches import EvalBatches
from toolkit.train.callbacks.base import Callback
from toolkit.train.callbacks.throughput import Throughput

if TYPE_CHECKING:
    from toolkit.data.table import TensorTable
    from toolkit.train.task import Batch
    from toolkit.train.trainer import Trainer


class TaskEvaluation(Callback):
    """Evaluates on the held-out table of each task before the first step and at each of `task_ends` (in steps).

    The metrics are eval/task0/accuracy, eval/task0/loss, ...; after the last task the results get `accuracy_before`,
    `accuracy_matrix` and the scores of `AccuracyMatrix`. `batch_size` is over all ranks.
    """

    runs_after = (Throughput,)

    def __init__(self, tests: Sequence[TensorTable], task_ends: Sequence[int], *, batch_size: int = 1000):
        self.tests = list(tests)
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
