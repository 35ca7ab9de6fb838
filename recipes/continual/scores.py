"""Scores of continual learning, from the accuracy on each task after each."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


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
