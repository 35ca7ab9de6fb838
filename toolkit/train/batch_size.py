"""The micro-batch size: what is given, as large as fits into memory, or half of what did not fit.

The global batch is that of `--batch-size`, so the loss curve does not change; only the number of micro-batches is
chosen. `--auto-batch-size` trains a copy of the model, and tries a size only where the memory of smaller ones predicts
that it fits, because one rank that runs out of memory would leave the others waiting for it. Where a step of training
runs out of memory all the same, the run is started again with a smaller size (`SmallerMicroBatches`). The choice is a
file in the run's folder.
"""

from __future__ import annotations

import copy
import gc
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import psutil
import torch
from torch import nn

from toolkit.data.batches import AugmentedTable
from toolkit.data.table import TensorTable
from toolkit.errors import UserError, is_out_of_memory
from toolkit.experts.parallel.collectives import world_size
from toolkit.experts.parallel.groups import extremes_over_ranks
from toolkit.experts.parallel.nodes import ranks_per_node
from toolkit.experts.parallel.ownership import is_owned, ownership_of
from toolkit.run.folder import write_json, write_text
from toolkit.run.hardware import mappable_bytes, memory_limit_bytes, peak_bytes, reset_peak
from toolkit.run.run import Run
from toolkit.train.task import Task

CHOICE_FILE = "micro_batch_size.json"


def accumulation_steps(
    run: Run,
    task: Task,
    model: nn.Module,
    table: TensorTable | AugmentedTable,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
) -> int:
    """Micro-batches per step: those of the config or, with `auto_batch_size`, as few as fit. A collective.

    To be called before the model is prepared. A run that continues on as many processes keeps its choice, because the
    seed of a forward pass depends on the index of the micro-batch. Raises UserError where not even one sample per
    process fits.
    """
    choice = _choice_of(run)
    if choice is not None or not run.config.auto_batch_size:
        return _steps_of(run, choice)
    per_rank = run.config.batch_size // run.world_size
    peaks, budget = _measure(run, task, model, table, make_optimizer, _divisors(per_rank))
    fitting = [size for size, peak in peaks.items() if peak <= budget]
    if not fitting:
        needed = next(iter(peaks.values()))
        raise UserError(
            f"--auto-batch-size: one sample per process needs {_gib(needed)} of {_gib(budget)}: use a smaller "
            "model, --mixed-precision bf16, more processes, or a larger --memory-fraction."
        )
    chosen = max(fitting)
    pieces = per_rank // chosen
    used = f"{_gib(peaks[chosen])} of {_gib(budget)}"
    run.print(f"automatic batch size: {pieces} micro-batch(es) of {chosen} on each process, {used}")
    choice = {
        "world_size": run.world_size,
        "micro_batch_size": chosen,
        "peak_bytes": {str(size): peak for size, peak in peaks.items()},
        "budget_bytes": budget,
    }
    if run.is_main:
        write_json(run.folder / CHOICE_FILE, choice)
    return _take(run, choice)


def kept_accumulation_steps(run: Run) -> int:
    """Micro-batches per step: those that this run chose before it was interrupted, or the config's. A collective."""
    return _steps_of(run, _choice_of(run))


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


def try_sizes(sizes: Sequence[int], measure: Callable[[int], int], budget: int) -> dict[int, int]:
    """Bytes by size, of those among the ascending `sizes` that were tried on the way to the largest within `budget`.

    Upwards, by a factor of two at first. Memory grows in a straight line with the size, so once two sizes are known
    steps are longer, and what the line puts above the budget is not tried. Where measuring proves the line wrong,
    what lies in between is tried.
    """
    peaks = {sizes[0]: measure(sizes[0])}
    size = sizes[0]
    larger = list(sizes[1:])
    while peaks[size] <= budget and larger:
        slope = _slope(peaks)
        reach = 4 if slope > 0 else 2
        within = [s for s in larger if s <= reach * size] or larger[:1]
        within = [s for s in within if peaks[size] + slope * (s - size) <= budget]
        if not within:
            break
        tried = within[-1]
        peaks[tried] = measure(tried)
        if peaks[tried] <= budget:
            size, larger = tried, [s for s in larger if s > tried]
        else:
            larger = [s for s in larger if s < tried]
    return peaks


def _slope(peaks: Mapping[int, int]) -> float:
    """Bytes per sample, between the two largest sizes known; 0 where there is nothing to go by. A size that the
    allocator refused has no bytes to go by."""
    *_, before, last = [0, 0, *sorted(size for size, peak in peaks.items() if peak < sys.maxsize)]
    if before == 0:
        return 0.0
    return max(0.0, (peaks[last] - peaks[before]) / (last - before))


def _measure(
    run: Run,
    task: Task,
    model: nn.Module,
    table: TensorTable | AugmentedTable,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    sizes: Sequence[int],
) -> tuple[dict[int, int], int]:
    """By micro-batch size, the largest peak bytes of all ranks; and the smallest budget of all ranks."""
    trial = TrialSteps(run, task, model, table, make_optimizer)

    def worst(size: int) -> int:
        largest, _ = extremes_over_ranks(torch.tensor(trial.peak_bytes(size), device=run.device))
        return int(largest)

    mine = memory_budget(run.device, run.config.memory_fraction)
    budget = int(extremes_over_ranks(torch.tensor(mine, device=run.device))[1])
    try:
        return try_sizes(sizes, worst, budget), budget
    finally:
        trial.close()


class TrialSteps:
    """Trains a deep copy of a model and its task: the originals keep their counters and random state."""

    def __init__(
        self,
        run: Run,
        task: Task,
        model: nn.Module,
        table: TensorTable | AugmentedTable,
        make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    ):
        self.run, self.table = run, table
        # The task may hold the model, so they are copied together; process groups cannot be copied.
        shared = {id(s.groups): s.groups for p in model.parameters() if (s := ownership_of(p)) is not None}
        copies: tuple[Task, nn.Module] = copy.deepcopy((task, model), dict(shared))
        self.task = copies[0]
        self.model = copies[1].to(run.device).train()
        self.optimizer = make_optimizer(self.model)
        dense = [p for p in model.parameters() if p.requires_grad and not is_owned(p)]
        self.buckets_bytes = _bytes(dense) if run.world_size > 1 else 0
        """DDP's buckets, beside the gradients."""
        # On a CPU the model itself lies in the memory that is measured.
        self.copy_bytes = _bytes(model.parameters()) if run.device.type == "cpu" else 0

    def peak_bytes(self, size: int) -> int:
        """The most memory in two steps of `size` samples; the second has optimizer states from its start."""
        device = self.run.device
        batch = {k: v.to(device) for k, v in self.table[torch.arange(size) % len(self.table)].items()}
        gc.collect()
        reset_peak(device)
        try:
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                for _ in range(2):
                    with self.run.accelerator.autocast():
                        loss = self.task.loss(self.model, batch)
                    loss.total.backward()
                    self.optimizer.step()
                    self.optimizer.zero_grad()
        except (RuntimeError, MemoryError) as error:
            # Of several ranks the others wait in a collective, for one that cannot come.
            if self.run.world_size > 1 or not is_out_of_memory(error):
                raise
            return sys.maxsize
        return peak_bytes(device) + self.buckets_bytes - self.copy_bytes

    def close(self) -> None:
        """Free the copy's memory."""
        del self.task, self.model, self.optimizer
        gc.collect()
        if self.run.device.type == "cuda":
            torch.cuda.empty_cache()


# --- memory ------------------------------------------------------------------------------------------------------


def memory_budget(device: torch.device, fraction: float) -> int:
    """Bytes that this process may use: a fraction of its GPU, or of its part of what the machine can still give."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        others = total - free - torch.cuda.memory_reserved(device)
        return int(fraction * total) - others
    here = psutil.Process().memory_info().rss
    processes = ranks_per_node(world_size())
    budgets = [fraction * psutil.virtual_memory().available / processes + here]
    if (limit := memory_limit_bytes()) is not None:
        budgets.append(fraction * limit / processes)
    if (left := mappable_bytes()) is not None:
        budgets.append(fraction * left + here)
    return int(min(budgets))


# --- parts -------------------------------------------------------------------------------------------------------


def _steps_of(run: Run, choice: Mapping[str, Any] | None) -> int:
    return run.config.gradient_accumulation_steps if choice is None else _take(run, choice)


def _take(run: Run, choice: Mapping[str, Any]) -> int:
    """Have the run train as `choice` says; returns the micro-batches per step."""
    chosen = choice["micro_batch_size"]
    run.describe(micro_batch_size=chosen)
    if (refused := choice.get("out_of_memory_with")) is not None:
        run.describe(out_of_memory_with=refused)
        run.print(f"micro-batches of {chosen} sample(s) on each process, because memory ran out with {refused}")
    run.accelerator.gradient_accumulation_steps = run.config.batch_size // run.world_size // chosen
    return run.accelerator.gradient_accumulation_steps


def _choice_of(run: Run) -> dict[str, Any] | None:
    """What this run chose on as many processes before it was interrupted. A collective where it continues."""
    return run.on_main_and_share(lambda: _choice_in(run)) if run.continues else None


def _choice_in(run: Run) -> dict[str, Any] | None:
    """What the folder says of as many processes as there are."""
    path = run.folder / CHOICE_FILE
    if not path.exists():
        return None
    choice: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return choice if choice["world_size"] == run.world_size else None


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _bytes(parameters: Any) -> int:
    return sum(p.numel() * p.element_size() for p in parameters)


def _gib(number: int) -> str:
    return "more memory than there is" if number >= sys.maxsize else f"{number / 2**30:.2f} GiB"
