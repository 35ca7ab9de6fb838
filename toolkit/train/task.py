"""The loss of a batch as a sum and a count, so that it does not depend on the number of processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from torch import Tensor, nn

from toolkit.data.table import Batch, TensorTable
from toolkit.errors import require_type

if TYPE_CHECKING:
    from jaxtyping import Float, Int


@dataclass(frozen=True, slots=True)
class Loss:
    """One micro-batch's share of the loss of one step.

    The trainer minimises, over all ranks and micro-batches j of a step, with C the sum of their counts,

        sum_j  sums_j / C  +  penalty_j * C_j / C

    so a step's loss depends on the global batch, not on its division into micro-batches and ranks.
    """

    sum: Float[Tensor, ""]
    """Scalar: the per-example losses of this micro-batch on this rank, added up."""
    count: int | Int[Tensor, ""]
    """How many examples (or targets) `sum` covers."""
    penalty: Float[Tensor, ""] | None = None
    """Scalar: this rank's share of a term that is a mean over the micro-batch of *all* ranks (a router's
    balance loss); the shares of the ranks add up to it."""
    sums: Mapping[str, Tensor] = field(default_factory=dict)
    """More sums to report as means over the same count, such as the number of correct answers, or a table of counts
    for `summarise` to turn into a number."""

    @property
    def total(self) -> Float[Tensor, ""]:
        """`sum` and, if there is one, `penalty`: for the backward of a batch that is no part of a step."""
        return self.sum if self.penalty is None else self.sum + self.penalty


def as_loss(result: object, method: str) -> Loss:
    """`result`, which the `method` of a task returned. Raises UserError where it is no `Loss`."""
    require_type(f"task.{method}(model, batch)", result, Loss, "Return a tk.Loss of a sum and a count")
    return result  # type: ignore[return-value]


@runtime_checkable
class Task(Protocol):
    """Computes a `Loss` from a model and a batch. Holds no model: the trainer passes the prepared one.

    A task may have two more methods. `summarise(means) -> metrics`, for metrics that are no means, such as an F1 score
    or a word error rate, gets the means of what `evaluate` summed, over all batches and ranks, and returns what to
    report instead. `for_run` is described in `AdaptsToRun`.

    Example:
        >>> import toolkit as tk
        >>> class Regression:
        ...     def count(self, batch):
        ...         return len(batch["target"])
        ...
        ...     def loss(self, model, batch):
        ...         error = model(batch["input"]) - batch["target"]
        ...         return tk.Loss(error.square().sum(), self.count(batch))
        ...
        ...     evaluate = loss
    """

    def count(self, batch: Batch) -> int | Int[Tensor, ""]:
        """How many examples `loss` will divide by, known before the forward pass. A tensor on the batch's device where
        the host would have to wait to know it; of one kind for all batches of a step."""
        ...

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """The training loss. A batch may be empty: `sum` is then zero and still connected to the model."""
        ...

    def evaluate(self, model: nn.Module, batch: Batch) -> Loss:
        """The loss and sums to report on held-out data; called without gradients."""
        ...


@runtime_checkable
class AdaptsToRun(Protocol):
    """A task that checks the data of a run."""

    def for_run(self, tables: Mapping[str, TensorTable]) -> Task:
        """Return the task whose first forward pass checks the labels of `tables` (by name: training, test,
        validation)."""
        ...
