"""Smaller micro-batches after a step ran out of memory. The global batch stays, so the loss curve does not change."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING

from toolkit.errors import StepOutOfMemory, UserError, is_out_of_memory
from toolkit.run.folder import write_text
from toolkit.run.micro_batches import MICRO_BATCH_SIZE, MicroBatches
from toolkit.run.run import Run
from toolkit.train.callbacks.base import Callback

if TYPE_CHECKING:
    from toolkit.train.trainer import Trainer


class SmallerMicroBatches(Callback):
    """Raise `StepOutOfMemory` on all ranks if a step of one ran out of memory and micro-batches can be smaller.

    The rank notes the smaller size in the run's folder and exits, so that the collectives of the other ranks fail; they
    read the folder then. Restarted ranks read the size there. The step is not repeated in this process: ranks are in
    different collectives, and buffers, counts and DDP's buckets have part of the step.
    """

    runs_after = (Callback,)
    """It raises, after the other callbacks know that the run ends."""

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        if not isinstance(error, Exception) or isinstance(error, UserError):
            return
        run, accumulation = trainer.run, trainer.batches.accumulation
        if trainer.phase == "step" and is_out_of_memory(error):
            traceback.clear_frames(error.__traceback__)  # which hold the activations
            smaller = _shrink(run, accumulation)
        else:
            smaller = _shrunk(run, accumulation) if run.world_size > 1 else None
        if smaller is not None:
            before = run.config.batch_size // run.world_size // accumulation
            raise StepOutOfMemory(
                f"step {trainer.state.step + 1:,} ran out of memory with micro-batches of {before} sample(s) on each "
                f"process: the run continues from its newest checkpoint with {smaller}.",
                run.folder,
            ) from error


def _shrink(run: Run, accumulation: int) -> int | None:
    """Note in the folder half the size of micro-batches, or the next smaller size that divides.

    Called by the rank that ran out of memory in a step of `accumulation` micro-batches. Returns the new size, or None
    if a micro-batch has one sample or the folder cannot be written.
    """
    per_rank = run.config.batch_size // run.world_size
    failed = per_rank // accumulation
    if failed < 2:
        return None
    chosen = max(size for size in range(1, failed // 2 + 1) if per_rank % size == 0)
    noted = MicroBatches(world_size=run.world_size, micro_batch_size=chosen, out_of_memory_with=failed)
    try:
        # Several ranks may do so at once: each has its own unfinished file.
        partial = f".{MICRO_BATCH_SIZE}.{run.rank}.partial"
        write_text(run.folder / MICRO_BATCH_SIZE, noted.model_dump_json(indent=2) + "\n", partial=partial)
    except OSError:
        return None
    return chosen


def _shrunk(run: Run, accumulation: int) -> int | None:
    """Return the smaller size that another rank noted since a step had `accumulation` micro-batches, or None."""
    per_rank = run.config.batch_size // run.world_size
    noted = MicroBatches.read(run.folder, per_rank, run.world_size)
    smaller = noted is not None and noted.micro_batch_size < per_rank // accumulation
    return noted.micro_batch_size if noted is not None and smaller else None
