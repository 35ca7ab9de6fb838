"""How many micro-batches a step has: as the config says, or more of them after a step ran out of memory.

The global batch is that of `batch_size`, so the loss curve does not change. Where a step runs out of memory, the run is
started again with smaller micro-batches (`SmallerMicroBatches`). Their size is a file in the run's folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from toolkit.run.folder import write_text
from toolkit.run.run import Run

CHOICE_FILE = "micro_batch_size.json"


def accumulation_steps(run: Run) -> int:
    """Returns micro-batches per step: those that this run came to before it was interrupted, or the config's.

    A collective, to be called before the model is prepared. A run that continues on as many processes keeps its choice,
    because the seed of a forward pass depends on the index of the micro-batch.
    """
    choice = run.on_main_and_share(lambda: _choice_in(run)) if run.continues else None
    return run.config.gradient_accumulation_steps if choice is None else _take(run, choice)


def shrink(run: Run, accumulation: int) -> int | None:
    """Note in the folder that micro-batches are to be half as large as now, or the next smaller size that divides.

    To be called by the rank that ran out of memory in a step of `accumulation` micro-batches. Returns the new size, or
    None where a micro-batch has one sample, or the folder cannot be written.
    """
    per_rank = run.config.batch_size // run.world_size
    refused = per_rank // accumulation
    if refused < 2:
        return None
    chosen = max(size for size in _divisors(per_rank) if 2 * size <= refused)
    choice = {
        **(_choice_in(run) or {"world_size": run.world_size}),
        "micro_batch_size": chosen,
        "out_of_memory_with": refused,
    }
    try:
        # Several ranks may do so at once: each has its own unfinished file.
        text = json.dumps(choice, indent=2) + "\n"
        write_text(run.folder / CHOICE_FILE, text, partial=f".{CHOICE_FILE}.{run.rank}.partial")
    except OSError:
        return None
    return chosen


def shrunk(run: Run, accumulation: int) -> int | None:
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
    path = run.folder / CHOICE_FILE
    if not path.exists():
        return None
    choice: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return choice if choice["world_size"] == run.world_size else None


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
