"""summary.txt: recipe, data, results, machine and folder of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RESTART_REASON = "run/restart_reason"
"""Key of the restart reason in metrics.jsonl."""
FEW_EXPERTS = 16
"""The summary lists the loads of so many experts, and of more the largest and the smallest one."""


def summarise(results: Mapping[str, Any], folder: Path) -> str:
    """Return the final numbers as aligned plain text."""
    compared = results.get("comparison")
    return aligned([*facts(results), ("files", str(folder))]) + (f"\n{table(compared)}" if compared else "")


def facts(results: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the final numbers as (name, text) rows."""

    def has(*names: str) -> bool:
        return all(isinstance(results.get(name), (int, float)) for name in names)

    rows = [("recipe", str(results.get("recipe")))]
    if results.get("dataset"):
        notice = results.get("dataset_notice")
        rows.append(("data", f"{results['dataset']}" + (f" ({notice})" if notice else "")))
    if has("test_accuracy"):
        loss = f", loss {results['test_loss']:.4f}" if has("test_loss") else ""
        f1 = f", macro-F1 {results['test_macro_f1']:.3f}" if has("test_macro_f1") else ""
        rows.append(("test accuracy", f"{results['test_accuracy']:.2%}{loss}{f1}"))
    if has("test_bits_per_byte", "test_loss"):
        perplexity = math.exp(results["test_loss"])
        rows.append(("held-out text", f"{results['test_bits_per_byte']:.4f} bits/byte, perplexity {perplexity:.3f}"))
    if has("validation_loss"):
        accuracy = f"{results['validation_accuracy']:.2%}, " if has("validation_accuracy") else ""
        rows.append(("validation", f"{accuracy}loss {results['validation_loss']:.4f}"))
    for layer, shares in results.get("expert_load", {}).items():
        percent = [f"{100 * share:.0f}" for share in sorted(shares, reverse=True)]
        load = " ".join(percent) if len(percent) <= FEW_EXPERTS else f"{percent[0]} to {percent[-1]}"
        rows.append(("load per expert", f"{load} % in {layer}"))
    if results.get("expert_load_notice"):
        rows.append(("uneven load", str(results["expert_load_notice"])))
    if (moved := moves(results)) is not None:
        rows.append(("moved experts", moved))
    if has("active_experts", "lifecycle_grow", "lifecycle_merge", "lifecycle_prune", "lifecycle_undone"):
        events = ", ".join(
            f"{results[f'lifecycle_{kind}']} {done}"
            for kind, done in (("grow", "split off"), ("merge", "merged"), ("prune", "pruned"), ("undone", "undone"))
        )
        rows.append(("experts", f"{results['active_experts']} at the end; changes: {events}"))
    if best := results.get("best_checkpoint"):
        value = best["evaluated"][best["metric"]]
        rows.append(("best checkpoint", f"of step {best['step']:,}, with {best['metric']} {value:.4f}"))
    if has("steps", "samples"):
        epochs = f", {results['epochs']:g} epochs" if has("epochs") else ""
        rows.append(("trained", f"{results['steps']:,} steps, {results['samples']:,} samples{epochs}"))
    if has("samples_per_second"):
        rows.append(("throughput", f"{results['samples_per_second']:,.0f} samples/s"))
    if has("wall_seconds"):
        rows.append(("time", duration(results["wall_seconds"])))
    if has("peak_memory_bytes"):
        rows.append(("peak memory", f"{results['peak_memory_bytes'] / 2**30:.2f} GiB per process"))
    if has("micro_batch_size", "out_of_memory_with"):
        refused = f", because a step ran out of memory with {results['out_of_memory_with']}"
        rows.append(("micro-batches", f"of {results['micro_batch_size']} sample(s) on each process{refused}"))
    if skipped := results.get("skipped_steps"):
        rows.append(("skipped", f"{skipped} step(s) whose gradients were not finite"))
    if restarts := results.get("restarts"):
        rows.append(("restarts", f"{len(restarts)}, the last {restarts[-1]}"))
    shards = f", expert parallelism over {results['ep_size']}" if results.get("ep_size", 1) > 1 else ""
    rows.append(("machine", f"{results.get('world_size')} process(es) on {results.get('device')}{shards}"))
    return rows


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
