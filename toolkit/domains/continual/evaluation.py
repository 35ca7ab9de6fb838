"""The accuracy on every task after each of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from toolkit.callbacks.base import Callback
from toolkit.domains.continual.scores import AccuracyMatrix

if TYPE_CHECKING:
    from toolkit.data.batches import EvalBatches
    from toolkit.trainer import Trainer


class TaskEvaluation(Callback):
    """Evaluates on held-out data of each task before the first step and at each of `task_ends` (in steps).

    The metrics are eval/task0/accuracy, eval/task0/loss, ...; when all tasks are learned, the results get
    `accuracy_before`, `accuracy_matrix` and the scores of `AccuracyMatrix`.
    """

    def __init__(self, tests: Sequence[EvalBatches], task_ends: Sequence[int]):
        self.tests, self.task_ends = list(tests), list(task_ends)
        self._before: list[float] = []
        self._after: list[list[float]] = []

    def on_fit_start(self, trainer: Trainer) -> None:
        if trainer.state.step == 0:
            self._before = self._evaluate(trainer)

    def on_step_end(self, trainer: Trainer) -> None:
        # Not those that are in the state: a checkpoint that was taken in time has them.
        if trainer.state.step in self.task_ends[len(self._after) :]:
            self._after.append(self._evaluate(trainer))

    def on_fit_end(self, trainer: Trainer) -> None:
        if len(self._after) == len(self.task_ends):
            matrix = AccuracyMatrix(self._before, self._after)
            trainer.results |= {"accuracy_before": self._before, "accuracy_matrix": self._after} | matrix.scores()

    def _evaluate(self, trainer: Trainer) -> list[float]:
        names = [f"eval/task{task}" for task in range(len(self.tests))]
        return [trainer.evaluate(test, name)[f"{name}/accuracy"] for test, name in zip(self.tests, names, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        return {"before": self._before, "after": self._after}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._before, self._after = list(state["before"]), [list(row) for row in state["after"]]
