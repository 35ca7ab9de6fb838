"""The callback that records the routing of a run in a trace, which `toolkit.experts.routing.traces` reads."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from toolkit.errors import UserError
from toolkit.experts.layer.moe_layer import Experts
from toolkit.experts.layer.stack import weight_bytes
from toolkit.experts.moving.migrate import optimizer_bytes
from toolkit.experts.parallel.collectives import is_main, world_size
from toolkit.experts.routing.forwards import Forwards, ModelForwards
from toolkit.experts.routing.traces import TraceFile
from toolkit.train.callbacks.base import Callback

if TYPE_CHECKING:
    from toolkit.data.table import Batch
    from toolkit.train.trainer import Trainer

CHUNK = 256
"""Forwards that are kept in memory before they are written."""


class TraceRecorder(Callback):
    """Records the routing of a model in a trace.

    Without a Trainer, call `step_done(step)` after each optimizer step and `close()` at the end, on all ranks. A
    resumed run writes a new file, `traces-<step>.npz`.

    Args:
        model: The model, after its experts were sharded; or its experts.
        path: The file to write; None is `traces.npz` in the run's folder, under a Trainer.
        metadata: Facts that are stored in the trace, as JSON can hold them.

    Raises:
        UserError: If layers have different numbers of experts, or are called more often than others.
    """

    def __init__(self, model: nn.Module | Experts, path: Path | None = None, **metadata: Any):
        self.path, self.metadata = path, metadata
        self.forwards = ModelForwards(Experts.of(model) if isinstance(model, nn.Module) else model)
        counts = [stack.num_experts for stack in self.forwards.stacks]
        if len(set(counts)) > 1:
            raise UserError(
                f"model: its layers have {counts} experts, and a trace has one number. Record equal layers."
            )
        self._pending: list[tuple[Forwards, list[int]]] = []
        self._file: TraceFile | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._is_main = is_main()

    def step_done(self, step: int) -> None:
        """Record the forward passes since the last call as optimizer step `step`, from 0. A collective."""
        self._pending += [(forwards, [step] * len(forwards.sent_FLE)) for forwards in self.forwards.take()]
        if sum(len(steps) for _, steps in self._pending) >= CHUNK:
            self._flush()

    def close(self) -> None:
        """Write buffered data and close the file. A collective."""
        self._flush()
        self._seal()

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

    def _seal(self, *_: Any, **__: Any) -> None:
        if self._file is None:
            return
        stacks = self.forwards.stacks
        self._file.close(
            {
                "layers": self.forwards.names,
                "world_size": world_size(),
                "ep_size": stacks[0].groups.ep_size,
                "row_bytes": [[size.dispatched, size.combined] for size in self.forwards.row_bytes],
                "weight_bytes": [weight_bytes(stack) for stack in stacks],
                "optimizer_bytes": [optimizer_bytes(stack, self._optimizer) for stack in stacks],
                **self.metadata,
            }
        )
        self._file = None

    # --- under a Trainer ------------------------------------------------------------------------------------------

    def on_step_start(self, trainer: Trainer, micro_batches: list[Batch]) -> None:  # noqa: ARG002
        if self.path is None:
            # Not in `on_fit_start`: a checkpoint may be loaded after it. Forwards until now belong to no step.
            self.forwards.take()
            name = f"traces-{trainer.state.step}.npz" if trainer.state.step else "traces.npz"
            self.path = trainer.run.folder / name
            self._optimizer = trainer.optimizer
            self.metadata = {"name": trainer.run.name, "seed": trainer.run.seed, **self.metadata}

    def on_step_end(self, trainer: Trainer) -> None:
        self.step_done(trainer.state.step - 1)

    on_exception = _seal

    def on_fit_end(self, trainer: Trainer) -> None:  # noqa: ARG002
        self.close()
