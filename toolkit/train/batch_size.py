"""Micro-batches per optimizer step: the config's number, or more after a step ran out of memory.

The global batch stays `batch_size`, so the loss curve does not change. After a step that runs out of memory,
`SmallerMicroBatches` restarts the run with smaller micro-batches. A file in the run folder holds their size.
"""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING

from pydantic import PositiveInt

from toolkit.errors import StepOutOfMemory, UserError, is_out_of_memory, one_line, require
from toolkit.experts.options import Options
from toolkit.run.folder import MICRO_BATCH_SIZE, read_json, write_text
from toolkit.run.run import Run
from toolkit.train.callbacks.base import Callback

if TYPE_CHECKING:
    from toolkit.train.trainer import Trainer


class MicroBatches(Options, strict=True):
    """The content of micro_batch_size.json."""

    world_size: PositiveInt
    micro_batch_size: PositiveInt
    """Samples per micro-batch on each process."""
    out_of_memory_with: PositiveInt
    """The size that ran out of memory."""


def accumulation_steps(run: Run) -> int:
    """Return the micro-batches per step: the number that an interrupted run came to, or the config's.

    A collective. Call it before the model is prepared. A run that continues with the same world size keeps its number,
    because the seed of a forward pass depends on the index of the micro-batch.
    """
    choice = run.on_main_and_share(lambda: _choice_in(run)) if run.continues else None
    if choice is None:
        return run.config.gradient_accumulation_steps
    size, refused = choice.micro_batch_size, choice.out_of_memory_with
    run.describe(micro_batch_size=size, out_of_memory_with=refused)
    run.print(f"micro-batches of {size} sample(s) on each process, because memory ran out with {refused}")
    run.accelerator.gradient_accumulation_steps = run.config.batch_size // run.world_size // size
    return run.accelerator.gradient_accumulation_steps


class SmallerMicroBatches(Callback):
    """Raises `StepOutOfMemory` on all ranks if a step of one rank runs out of memory and micro-batches can be smaller.

    The rank writes the smaller size to the run folder and leaves, so that the collectives of the other ranks fail, and
    they read the folder. Restarted processes read the size there. The step is not repeated in the same process: ranks
    wait in different collectives, which not every backend can abort, and buffers, counts and DDP's buckets have
    changed.
    """

    runs_after = (Callback,)
    """This callback raises, after the other callbacks have handled the end of the run."""

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
    """Write to the run folder that micro-batches become half as large, or the next smaller size that divides.

    Called by the rank that ran out of memory in a step of `accumulation` micro-batches. Returns the new size, or None
    if a micro-batch has one sample or the folder cannot be written.
    """
    per_rank = run.config.batch_size // run.world_size
    refused = per_rank // accumulation
    if refused < 2:
        return None
    chosen = max(size for size in range(1, refused // 2 + 1) if per_rank % size == 0)
    choice = MicroBatches(world_size=run.world_size, micro_batch_size=chosen, out_of_memory_with=refused)
    try:
        # Several ranks may write at once: each has its own unfinished file.
        text = choice.model_dump_json(indent=2) + "\n"
        write_text(run.folder / MICRO_BATCH_SIZE, text, partial=f".{MICRO_BATCH_SIZE}.{run.rank}.partial")
    except OSError:
        return None
    return chosen


def _shrunk(run: Run, accumulation: int) -> int | None:
    """Return the smaller size that another rank wrote in a step of `accumulation` micro-batches, or None."""
    choice, now = _choice_in(run), run.config.batch_size // run.world_size // accumulation
    return choice.micro_batch_size if choice is not None and choice.micro_batch_size < now else None


def _choice_in(run: Run) -> MicroBatches | None:
    """Return the content of the file in the run folder, or None if there is none for this world size."""
    path, per_rank = run.folder / MICRO_BATCH_SIZE, run.config.batch_size // run.world_size
    if not path.exists():
        return None
    remedy = "delete it to train with the micro-batches of the config"
    values = read_json(path, remedy)
    try:
        choice = MicroBatches(**values)
        if choice.world_size != run.world_size:
            return None
        divides = per_rank % choice.micro_batch_size == 0
        require(divides, "micro_batch_size", choice.micro_batch_size, f"does not divide {per_rank} samples")
    except UserError as error:
        raise UserError(f"{path}: {one_line(error)}: {remedy}.") from None
    return choice
