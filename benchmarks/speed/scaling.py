"""Throughput, memory and share of communication of every recipe on 1, 2, 4 and 8 processes of one machine.

    python benchmarks/speed/scaling.py --data-dir DIR              all recipes, a quarter of an hour on two cores
    python benchmarks/speed/scaling.py --recipes mnist_moe har     some recipes; writes nothing

Each run has the published preset and global batch, one thread per process, no plots and no tracking. It has dozens of
steps, and the first log steps are a warm-up. With more processes than cores, rows show the cost of waiting, not the
speed-up of additional cores. Writes benchmarks/results/scaling.json, docs/images/scaling.png and the table of
docs/project/results.md.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.report import markdown, put_tables, write_report
from toolkit.run.pictures.plots import GREY, colour_of, save_figure
from toolkit.run.tracking.jsonl import read_metrics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WORLDS = (1, 2, 4, 8)
LINES, WARM_UP = 8, 2
"""Log steps of each run, and log steps of the warm-up."""


class Main(NamedTuple):
    """Published preset of a recipe, and steps per log step of about a second."""

    preset: str
    steps_per_line: int
    flags: tuple[str, ...] = ()


RECIPES = {
    "mnist_moe": Main("full", 50, ("--dataset", "mnist")),
    "lm_moe": Main("full", 15, ("--dataset", "tinyshakespeare")),
    "finetune_moe": Main("full", 5, ("--no-compare", "--eval-blocks", "64", "--dataset", "stdlib")),
    "vae_robustness": Main("full", 40, ("--dataset", "mnist")),
    "few_labels": Main("fixmatch_vat", 6, ("--dataset", "mnist")),
    "har": Main("full", 25),
    "lmu_speech": Main("fsdd", 6),
    # The published batch size of 100 is not divisible by eight.
    "psmnist": Main("parallel", 6, ("--batch-size", "96")),
}


def measure(recipe: str, main: Main, processes: int, *flags: object) -> dict[str, Any]:
    """Run a recipe on `processes` processes and return a row of the table."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        command = [sys.executable, str(ROOT / "recipes" / f"{recipe}.py"), main.preset, "--run-dir", folder]
        command += ["--num-processes", processes, "--tracker", "none", *main.flags, *flags]
        command += ["--max-steps", LINES * main.steps_per_line, "--log-every", main.steps_per_line]
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        done = subprocess.run([str(word) for word in command], env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{recipe} on {processes} process(es): {done.stderr}")
        lines = [line for line in read_metrics(folder / "metrics.jsonl") if "perf/step_time_ms" in line][WARM_UP:]

    def typical(name: str) -> float:
        return median(line.get(name, 0.0) for line in lines)

    step_ms = typical("perf/step_time_ms")
    return {
        "recipe": f"{recipe} {main.preset}",
        "processes": processes,
        "samples per second": round(typical("perf/samples_per_second")),
        "step, ms": round(step_ms, 1),
        "exchange, %": round(100 * typical("perf/exchange_ms") / step_ms, 1),
        "collectives and waiting, %": round(100 * typical("perf/collectives_ms") / step_ms, 1),
        "peak MiB of a process": round(typical("perf/peak_memory_bytes") / 2**20),
    }


def draw(figure: Figure, rows: Sequence[dict[str, Any]]) -> None:
    """Plot the speed-up over one process and the share of collectives in a step."""
    figure.set_size_inches(11, 3.8)
    names = list(dict.fromkeys(row["recipe"] for row in rows))
    rate, share = figure.subplots(1, 2)
    for number, name in enumerate(names):
        colour = colour_of(number)
        line = [row for row in rows if row["recipe"] == name]
        worlds = [row["processes"] for row in line]
        rate.plot(worlds, [row["times one process"] for row in line], color=colour, marker="o", ms=4, label=name)
        share.plot(worlds, [row["collectives and waiting, %"] for row in line], color=colour, marker="o", ms=4)
    cores = os.cpu_count() or 1
    rate.plot(WORLDS, [min(world, cores) for world in WORLDS], color=GREY, ls="--", lw=1, label=f"{cores} cores")
    for axes, title in ((rate, "speed-up over one process"), (share, "collectives, % of a step")):
        axes.set_title(title)
        axes.set_xscale("log", base=2)
        axes.set_xticks(WORLDS, [str(world) for world in WORLDS])
        axes.set_xlabel("processes")
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", color=GREY, alpha=0.25, lw=0.6)
    figure.legend(*rate.get_legend_handles_labels(), loc="outside right center")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, help="folder with data. Default: $TOOLKIT_DATA_DIR or the Hub")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES), help="Default: all")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    data = ("--data-dir", options.data_dir) if options.data_dir is not None else ()
    for recipe in options.recipes:
        one_process = 0.0
        for processes in WORLDS:
            row = measure(recipe, RECIPES[recipe], processes, "--cpu", *data)
            one_process = one_process or row["samples per second"]
            rows.append(row | {"times one process": round(row["samples per second"] / one_process, 2)})
            print(rows[-1], flush=True)
    if len(options.recipes) < len(RECIPES):
        print(markdown(rows))
        return 0
    write_report("scaling", rows)
    save_figure(ROOT / "docs" / "images" / "scaling.png", partial(draw, rows=rows))
    table = markdown(rows)
    put_tables(
        ROOT / "docs" / "project" / "results.md",
        "speed/scaling.py",
        f"<!-- figures: scaling.json by recipe and processes -->\n{table}",
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
