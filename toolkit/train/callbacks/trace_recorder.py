"""The callback that records the routing of a run in a trace, which `toolkit.experts.routing.traces` reads."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from toolkit.errors import UserError
from toolkit.experts.layer.stack import optimizer_bytes, weight_bytes
from toolkit.experts.parallel.collectives import is_main, world_size
from toolkit.experts.routing.forwards import Forwards, ModelForwards
from toolkit.experts.routing.routing_log import Choices, count_pairs
from toolkit.experts.routing.traces import TraceFile
from toolkit.train.callbacks.base import Callback

if TYPE_CHECKING:
    from toolkit.data.table import Batch
    from toolkit.train.trainer import Trainer

CHUNK = 256
"""Forwards that are kept in memory before they are written."""
PAIRS_EVERY = 10
"""Steps between counts of which experts are chosen together."""


class TraceRecorder(Callback):
    """Records the routing of a model in a trace.

    Without a Trainer, call `step_done(step)` after each optimizer step and `close()` at the end, on all ranks. A
    resumed run writes a new file, `traces-<step>.npz`.

    Args:
        model: The model before it is prepared.
        path: The file to write; None is `traces.npz` in the run's folder, under a Trainer.
        metadata: Facts that are stored in the trace, as JSON can hold them.

    Raises:
        UserError: If layers have different numbers of experts, or are called more often than others.
    """

    def __init__(self, model: nn.Module, path: Path | None = None, **metadata: Any):
        self.path, self.metadata = path, metadata
        self.forwards = ModelForwards(model, choices=True)
        experts = [stack.num_experts for stack in self.forwards.stacks]
        if len(set(experts)) > 1:
            raise UserError(f"layers of {experts} experts cannot be recorded in one trace: give all equally many.")
        self._together_LEE: Tensor | None = None
        self._pending: list[tuple[Forwards, list[int]]] = []
        self._file: TraceFile | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._is_main = is_main()

    def step_done(self, step: int) -> None:
        """Record the forwards since the last call as those of optimizer step `step`, from 0. A collective."""
        new = self.forwards.take()
        if new and step % PAIRS_EVERY == 0:
            self._count_pairs(new[-1].last_choices)
        for forwards in new:
            self._pending.append((forwards._replace(last_choices=[]), [step] * len(forwards.sent_FLE)))
        if sum(len(steps) for _, steps in self._pending) >= CHUNK:
            self._flush()

    def close(self) -> None:
        """Write what is left and close the file. A collective."""
        self._flush()
        together = self._together_LEE
        if together is not None and dist.is_initialized():
            dist.all_reduce(together)
        self._seal(None if together is None else together.cpu().numpy())

    def _flush(self) -> None:
        """Gather pending loads on the main process, in one chunk per placement, and write them there."""
        pending, self._pending = self._pending, []
        for placements, group in itertools.groupby(pending, key=lambda item: item[0].placements):
            items = list(group)
            steps = [step for _, steps in items for step in steps]
            mine = torch.cat([forwards.sent_FLE for forwards, _ in items]).int()
            sources = [mine]
            if dist.is_initialized():
                sources = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
                dist.all_gather(sources, mine)
                # One EP group after the other: each is consecutive sources, whichever ranks they are.
                groups = self.forwards.stacks[0].groups.ep_groups
                sources = [sources[rank] for group in groups for rank in group]
            if self._is_main:
                assert self.path is not None
                self._file = self._file or TraceFile(self.path)
                self._file.add(torch.stack(sources, dim=2).cpu().numpy(), steps, placements)

    def _count_pairs(self, choices: list[Choices | None]) -> None:
        """Count which experts the tokens of one forward chose together, per layer."""
        pairs = [count_pairs([layer], self.forwards.stacks[0].num_experts) for layer in choices if layer is not None]
        pairs_LEE = torch.stack(pairs)
        self._together_LEE = pairs_LEE if self._together_LEE is None else self._together_LEE + pairs_LEE

    def _seal(self, together_LEE: NDArray[Any] | None) -> None:
        if self._file is None:
            return
        stacks = self.forwards.stacks
        facts = {
            "layers": self.forwards.names,
            "world_size": world_size(),
            "ep_size": stacks[0].groups.ep_size,
            "row_bytes": [[size.dispatched, size.combined] for size in self.forwards.row_bytes],
            "weight_bytes": [weight_bytes(stack) for stack in stacks],
            "optimizer_bytes": [optimizer_bytes(stack, self._optimizer) for stack in stacks],
        }
        self._file.close({**facts, **self.metadata}, together_LEE)
        self._file = None

    # --- under a Trainer ------------------------------------------------------------------------------------------

    def on_step_start(self, trainer: Trainer, micro_batches: list[Batch]) -> None:  # noqa: ARG002
        if self.path is None:
            # Not in `on_fit_start`: a checkpoint may be loaded after it. Forwards until now belong to no step.
            self.forwards.take()
            name = f"traces-{trainer.state.step}.npz" if trainer.state.step else "traces.npz"
            self.path = trainer.run.folder / name
            self._optimizer = trainer.optimizer
            facts = {"name": trainer.run.name, "seed": trainer.run.seed}
            self.metadata = {**facts, **self.metadata}

    def on_step_end(self, trainer: Trainer) -> None:
        self.step_done(trainer.state.step - 1)

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:  # noqa: ARG002
        self._seal(None)

    def on_fit_end(self, trainer: Trainer) -> None:  # noqa: ARG002
        self.close()
