"""How many micro-batches a step has: as the config says, or more of them after a step ran out of memory.

The global batch is that of `batch_size`, so the loss curve does not change. Where a step runs out of memory, the run is
started again with smaller micro-batches (`SmallerMicroBatches`). Their size is a file in the run's folder.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from toolkit.errors import StepOutOfMemory, UserError, is_out_of_memory
from toolkit.run.folder import MICRO_BATCH_SIZE, write_text
from toolkit.run.run import Run
from toolkit.train.callbacks.base import Callback

if TYPE_CHECKING:
    from toolkit.train.trainer import Trainer


def accumulation_steps(run: Run) -> int:
    """Returns micro-batches per step: those that this run came to before it was interrupted, or the config's.

    A collective, to be called before the model is prepared. A run that continues on as many processes keeps its choice,
    because the seed of a forward pass depends on the index of the micro-batch.
    """
    choice = run.on_main_and_share(lambda: _choice_in(run)) if run.continues else None
    return run.config.gradient_accumulation_steps if choice is None else _take(run, choice)


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
    """Note in the folder that micro-batches are to be half as large as now, or the next smaller size that divides.

    To be called by the rank that ran out of memory in a step of `accumulation` micro-batches. Returns the new size, or
    None where a micro-batch has one sample, or the folder cannot be written.
    """
    per_rank = run.config.batch_size // run.world_size
    refused = per_rank // accumulation
    if refused < 2:
        return None
    chosen = max(size for size in range(1, refused // 2 + 1) if per_rank % size == 0)
    choice = {
        **(_choice_in(run) or {"world_size": run.world_size}),
        "micro_batch_size": chosen,
        "out_of_memory_with": refused,
    }
    try:
        # Several ranks may do so at once: each has its own unfinished file.
        text = json.dumps(choice, indent=2) + "\n"
        write_text(run.folder / MICRO_BATCH_SIZE, text, partial=f".{MICRO_BATCH_SIZE}.{run.rank}.partial")
    except OSError:
        return None
    return chosen


def _shrunk(run: Run, accumulation: int) -> int | None:
    """The smaller size that another rank has noted since this one began with `accumulation` micro-batches, or None."""
    choice = _choice_in(run) or {"micro_batch_size": run.config.batch_size}
    now = run.config.batch_size // run.world_size // accumulation
    return choice["micro_batch_size"] if choice["micro_batch_size"] < now else None


def _take(run: Run, choice: Mapping[str, Any]) -> int:
    """Have the run train as `choice` says; returns the micro-batches per step."""
    chosen = choice["micro_batch_size"]
    run.describe(micro_batch_size=chosen)
    if (refused := choice.get("out_of_memory_with")) is not None:
        run.describe(out_of_memory_with=refused)
        run.print(f"micro-batches of {chosen} sample(s) on each process, because memory ran out with {refused}")
    run.accelerator.gradient_accumulation_steps = run.config.batch_size // run.world_size // chosen
    return run.accelerator.gradient_accumulation_steps


def _choice_in(run: Run) -> dict[str, Any] | None:
    """Returns what the folder says of as many processes as there are."""
    path = run.folder / MICRO_BATCH_SIZE
    if not path.exists():
        return None
    choice: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return choice if choice["world_size"] == run.world_size else None
