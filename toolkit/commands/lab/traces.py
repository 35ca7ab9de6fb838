"""Routing traces: assignments per source rank and expert in each training forward of a run.

A trace is one `.npz` file: a ZIP of arrays, `load_<n>` int32 (F, L, S, E) and `step_<n>` int64 (F) in chunks,
`together` int64 (L, E, E), and `metadata` as JSON text. No pickle. Letters as in `toolkit.experts.routing.metrics`.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from toolkit.errors import UserError
from toolkit.experts.layer.stack import optimizer_bytes, weight_bytes
from toolkit.experts.parallel.collectives import is_main, world_size
from toolkit.experts.placement.placement import ExpertPlacement
from toolkit.experts.routing.forwards import Forwards, ModelForwards
from toolkit.experts.routing.metrics import RowBytes
from toolkit.experts.routing.routing_log import Choices, count_pairs
from toolkit.train.callbacks.base import Callback

if TYPE_CHECKING:
    from toolkit.data.table import Batch
    from toolkit.train.trainer import Trainer

FORMAT = 1
CHUNK = 256
"""Forwards that are kept in memory before they are written."""
PAIRS_EVERY = 10
"""Steps between counts of which experts are chosen together."""


@dataclass(frozen=True)
class Trace:
    """The contents of a trace file."""

    load_FLSE: NDArray[np.int32]
    step_F: NDArray[np.int64]
    """The optimizer step of each forward, from 0."""
    placements: list[tuple[int, tuple[ExpertPlacement, ...]]]
    """(first forward, placements from then on, one per layer)"""
    metadata: dict[str, Any]
    together_LEE: NDArray[np.int64] | None = None
    """How many tokens chose both experts, in one forward of each `PAIRS_EVERY` steps."""

    @property
    def layers(self) -> list[str]:
        return list(self.metadata["layers"])

    @property
    def row_bytes(self) -> list[RowBytes]:
        """Per layer."""
        return [RowBytes(*pair) for pair in self.metadata["row_bytes"]]

    @property
    def digest(self) -> str:
        """SHA-256 of the loads."""
        shape = json.dumps(self.load_FLSE.shape).encode()
        return hashlib.sha256(shape + np.ascontiguousarray(self.load_FLSE, dtype="<i4").tobytes()).hexdigest()

    def load_TLSE(self) -> NDArray[np.int64]:
        """Loads per optimizer step."""
        steps = np.unique(self.step_F, return_inverse=True)[1]
        load = np.zeros((int(steps.max()) + 1, *self.load_FLSE.shape[1:]), dtype=np.int64)
        np.add.at(load, steps, self.load_FLSE)
        return load


class TraceFile:
    """Writes a trace in chunks, to `<path>.part` until it is closed."""

    def __init__(self, path: Path):
        self.path = path
        self._part = path.with_name(path.name + ".part")
        self._chunks = 0
        self._forwards = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        self._zip = zipfile.ZipFile(self._part, "w", zipfile.ZIP_DEFLATED)
        self._placements: list[dict[str, Any]] = []

    def add(self, load_FLSE: NDArray[Any], step_F: Sequence[int], placements: Sequence[ExpertPlacement]) -> None:
        """Append forwards under the same placements, one per layer."""
        now = [placement.to_dict() for placement in placements]
        if not self._placements or self._placements[-1]["layers"] != now:
            self._placements.append({"forward": self._forwards, "layers": now})
        self._write(f"load_{self._chunks:05d}", np.asarray(load_FLSE, dtype=np.int32))
        self._write(f"step_{self._chunks:05d}", np.asarray(step_F, dtype=np.int64))
        self._chunks, self._forwards = self._chunks + 1, self._forwards + len(step_F)

    def close(self, metadata: dict[str, Any], together_LEE: NDArray[Any] | None = None) -> None:
        """Write the metadata and rename the file to its final name."""
        facts = {"format": FORMAT, **metadata, "placements": self._placements}
        self._write("metadata", np.frombuffer(json.dumps(facts).encode(), dtype=np.uint8))
        if together_LEE is not None:
            self._write("together", np.asarray(together_LEE, dtype=np.int64))
        self._zip.close()
        self._part.replace(self.path)

    def _write(self, name: str, array: NDArray[Any]) -> None:
        buffer = io.BytesIO()
        np.lib.format.write_array(buffer, array, allow_pickle=False)
        self._zip.writestr(f"{name}.npy", buffer.getvalue())


def read_trace(path: Path) -> Trace:
    """The trace in `path`; raises UserError for a missing or damaged file."""
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            metadata = json.loads(file["metadata"].tobytes())
            chunks = sorted(name for name in file.files if name.startswith("load_"))
            load_FLSE = np.concatenate([file[name] for name in chunks])
            step_F = np.concatenate([file[name.replace("load_", "step_")] for name in chunks])
            together = file["together"] if "together" in file.files else None
            placements = [
                (change["forward"], tuple(ExpertPlacement.from_dict(layer) for layer in change["layers"]))
                for change in metadata.pop("placements")
            ]
            if metadata["format"] != FORMAT:
                raise UserError(f"trace {path} has format {metadata['format']}: record it anew for format {FORMAT}.")
    except FileNotFoundError:
        raise UserError(f"trace {path} does not exist: record one with --record-traces.") from None
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} cannot be read as a trace ({error}): give one that --record-traces wrote.") from None
    return Trace(load_FLSE, step_F, placements, metadata, together)


class TraceRecorder(Callback):
    """Records the routing of `model` in `path`; under a Trainer None means `traces.npz` in the run's folder.

    Without a Trainer, call `step_done(step)` after each optimizer step and `close()` at the end, on all ranks. A
    resumed run writes a new file, `traces-<step>.npz`. `metadata` is stored in the trace. Raises UserError for layers
    with different numbers of experts, and for layers that are called more often than others.
    """

    def __init__(self, model: nn.Module, path: Path | None = None, *, enabled: bool = True, **metadata: Any):
        self.enabled, self.path, self.metadata = enabled, path, metadata
        if not enabled:
            return
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
        if self.enabled and self.path is None:
            # Not in `on_fit_start`: a checkpoint may be loaded after it. Forwards until now belong to no step.
            self.forwards.take()
            name = f"traces-{trainer.state.step}.npz" if trainer.state.step else "traces.npz"
            self.path = trainer.run.folder / name
            self._optimizer = trainer.optimizer
            facts = {"name": trainer.run.name, "seed": trainer.run.seed}
            self.metadata = {**facts, **self.metadata}

    def on_step_end(self, trainer: Trainer) -> None:
        if self.enabled:
            self.step_done(trainer.state.step - 1)

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:  # noqa: ARG002
        if self.enabled:
            self._seal(None)

    def on_fit_end(self, trainer: Trainer) -> None:  # noqa: ARG002
        if self.enabled:
            self.close()
