"""summary.txt: recipe, data, results, machine and folder of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from toolkit.run.console import describe_processes

RESTART_REASON = "run/restart_reason"
"""Key of the restart reason in metrics.jsonl."""
FEW_EXPERTS = 16
"""The summary lists the loads of so many experts, and of more the largest and the smallest one."""


RESULTS = (
    ("recipe", "{recipe}"),
    ("data", "{dataset}", " ({dataset_notice})"),
    ("test accuracy", "{test_accuracy:.2%}", ", loss {test_loss:.4f}", ", macro-F1 {test_macro_f1:.3f}"),
    ("test words", "WER {test_wer:.2%}, CER {test_cer:.2%}"),
    ("held-out text", "{test_bits_per_byte:.4f} bits/byte, perplexity {perplexity:.3f}"),
    ("validation", "{validation_accuracy:.2%}, loss {validation_loss:.4f}"),
    ("validation", "loss {validation_loss:.4f}"),
)
COSTS = (
    ("uneven load", "{expert_load_notice}"),
    ("moved experts", "{moved}"),
    (
        "experts",
        "{active_experts} at the end; changes: {lifecycle_grow} split off, {lifecycle_merge} merged, "
        "{lifecycle_prune} pruned, {lifecycle_undone} undone",
    ),
    ("best checkpoint", "of step {best_checkpoint[step]:,}, with {best_checkpoint[metric]} {best_value:.4f}"),
    ("trained", "{steps:,} steps, {samples:,} samples", ", {epochs:g} epochs"),
    ("throughput", "{samples_per_second:,.0f} samples/s"),
    ("time", "{time}"),
    ("peak memory", "{peak_memory_gib:.2f} GiB per process"),
    (
        "micro-batches",
        "of {micro_batch_size} sample(s) on each process, because a step ran out of memory with {out_of_memory_with}",
    ),
    ("skipped", "{skipped_steps} step(s) whose gradients were not finite"),
    ("restarts", "{times_restarted}, the last {restarts[0]}"),
    ("machine", "{processes} on {device}", ", expert parallelism over {ep_groups_of}"),
)
"""Lines above and below the load of experts: name, text and further parts, without lines and parts that a run has no
results for."""


def summarise(results: Mapping[str, Any], folder: Path) -> str:
    """Return the final numbers as aligned plain text."""
    compared = results.get("comparison")
    return aligned([*facts(results), ("files", str(folder))]) + (f"\n{table(compared)}" if compared else "")


def facts(results: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the final numbers as (name, text) rows."""
    best, restarts = results.get("best_checkpoint"), results.get("restarts")
    seconds, peak, world = results.get("wall_seconds"), results.get("peak_memory_bytes"), results.get("world_size")
    derived = {
        "perplexity": math.exp(results["test_loss"]) if {"test_bits_per_byte", "test_loss"} <= results.keys() else None,
        "moved": moves(results),
        "best_value": best and best["evaluated"][best["metric"]],
        "time": None if seconds is None else duration(seconds),
        "peak_memory_gib": None if peak is None else peak / 2**30,
        "processes": None if world is None else describe_processes(world),
        "times_restarted": len(restarts) if restarts else None,
        "restarts": restarts and restarts[-1:],
        "ep_groups_of": results["ep_size"] if results.get("ep_size", 1) > 1 else None,
    }
    values = {name: value for name, value in {**results, **derived}.items() if value is not None}
    loads = [("load per expert", f"{_load(of)} % in {layer}") for layer, of in results.get("expert_load", {}).items()]
    return [*_lines(RESULTS, values), *loads, *_lines(COSTS, values)]


def _lines(texts: Sequence[tuple[str, ...]], values: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows: dict[str, str] = {}
    absent = suppress(KeyError, TypeError, ValueError)  # or a result of the user's own with this name
    for name, text, *parts in texts:
        with absent:
            rows.setdefault(name, text.format_map(values))
            for part in parts:
                with absent:
                    rows[name] += part.format_map(values)
    return list(rows.items())


def _load(shares: Sequence[float]) -> str:
    percent = [f"{100 * share:.0f}" for share in sorted(shares, reverse=True)]
    return " ".join(percent) if len(percent) <= FEW_EXPERTS else f"{percent[0]} to {percent[-1]}"


def moves(results: Mapping[str, Any]) -> str | None:
    """Describe the experts moved by a planner: number, steps, and imbalance before and after; None if none moved."""
    if not results.get("migrated_experts"):
        return None
    first, last = results["first_move_step"], results["last_move_step"]
    when = f"after step {first:,}" if first == last else f"after steps {first:,} to {last:,}"
    return (
        f"{results['migrated_experts']:,} {when}; busiest rank over the mean "
        f"{results['imbalance_before_moves']:.2f} before, {results['imbalance_after_moves']:.2f} since"
    )


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows with equal keys as a plain text table, with a header and right-aligned numbers; None is empty."""
    cells = [[str(key) for key in rows[0]]]
    cells += [
        [
            "" if v is None else f"{v:.4f}" if isinstance(v, float) else f"{v:,}" if isinstance(v, int) else v
            for v in row.values()
        ]
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    left = [isinstance(value, str) for value in rows[0].values()]
    return "".join(
        "  ".join(
            cell.ljust(width) if to_left else cell.rjust(width)
            for cell, width, to_left in zip(line, widths, left, strict=True)
        ).rstrip()
        + "\n"
        for line in cells
    )


def aligned(rows: Sequence[tuple[str, str]]) -> str:
    """Return a line for each (name, value) pair, with aligned values."""
    width = max(len(name) for name, _ in rows)
    return "".join(f"{name:<{width}}  {value}\n" for name, value in rows)


def duration(seconds: float) -> str:
    """Format as `42.3 s`, `3 min 05 s` or `2 h 10 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
