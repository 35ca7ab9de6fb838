"""Has a run begin again with smaller micro-batches when a step runs out of memory."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING

from toolkit.errors import StepOutOfMemory, UserError, is_out_of_memory
from toolkit.train.batch_size import shrink, shrunk
from toolkit.train.callbacks.base import Callback

if TYPE_CHECKING:
    from toolkit.train.trainer import Trainer


class SmallerMicroBatches(Callback):
    """Raises `StepOutOfMemory` on all ranks when a step of one ran out of memory, and micro-batches can be smaller.

    The rank notes the smaller size in the run's folder and leaves, so that the collectives of the others fail; they
    look into the folder then. Processes that start again read the size there. The step is not repeated in this process:
    ranks are in different collectives, from which not every backend can be called back, and buffers, counts and DDP's
    buckets have taken in a part of the step.
    """

    runs_after = (Callback,)
    """It raises, and the others have to be told that the run ends."""

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        if not isinstance(error, Exception) or isinstance(error, UserError):
            return
        run, accumulation = trainer.run, trainer.batches.accumulation
        if trainer.phase == "step" and is_out_of_memory(error):
            traceback.clear_frames(error.__traceback__)  # which hold the activations
            smaller = shrink(run, accumulation)
        else:
            smaller = shrunk(run, accumulation) if run.world_size > 1 else None
        if smaller is not None:
            before = run.config.batch_size // run.world_size // accumulation
            raise StepOutOfMemory(
                f"step {trainer.state.step + 1:,} ran out of memory with micro-batches of {before} sample(s) on each "
                f"process: the run continues from its newest checkpoint with {smaller}.",
                run.folder,
            ) from error
