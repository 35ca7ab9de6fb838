"""The main step of every recipe on 1, 2, 4 and 8 processes of one machine: rates, memory, share of communication.

    python benchmarks/speed/scaling.py --data-dir DIR              all recipes, a quarter of an hour on two cores
    python benchmarks/speed/scaling.py --recipes mnist_moe har     some of them; writes nothing
    python benchmarks/speed/scaling.py --gpus                      a mixture on 1, 2, 4 ... GPUs of one machine
    python benchmarks/speed/scaling.py --gpus --rehearse           a tiny one on CPU processes; writes nothing

Each run is a recipe with its published preset and global batch, one thread per process, without plots and tracking, for
some dozens of steps; the first lines of its metrics are left out. Processes beyond the cores take turns on them: their
rows show what waiting costs, and not what more cores would bring. Writes benchmarks/results/scaling.json,
docs/images/scaling.png and the table of docs/experts/scaling.md.

With `--gpus` the recipe is `lm_moe`, a process for each GPU, with NCCL, in bfloat16 under autocast: 1.2 billion
parameters, two layers with the sizes of Qwen3-30B-A3B's experts, which with gradients, the states of AdamW, DDP's
buckets and activations take some 42 GiB of a GPU. Each GPU gets the same tokens however many there are (weak scaling).
All experts are on every GPU, under DDP, or spread over all; the efficiency is the tokens per second of a GPU over those
of one alone. Some ten minutes on eight GPUs. A run that fails, or that had to cut its batch because memory ran out, is
a row that says so. Writes benchmarks/results/scaling_gpus.json, anew after each run.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch

from benchmarks.report import markdown, put_tables, write_report
from toolkit.run.pictures.plots import GREY, palette, save_figure
from toolkit.run.tracking.jsonl import read_metrics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WORLDS = (1, 2, 4, 8)
OF_A_STEP = ("step, ms", "exchange, %", "collectives and waiting, %", "peak MiB of a process")
RESTART = "restart: "
"""What a run says where it begins again with smaller micro-batches, because memory ran out."""
LINES, WARM_UP = 8, 2
"""Lines of metrics of each run, and those at its beginning that are left out."""


class Main(NamedTuple):
    """A recipe's published preset, and how many steps make a line of metrics of about a second."""

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
    # The published batch of 100 cannot be cut into eight.
    "psmnist": Main("parallel", 6, ("--batch-size", "96")),
}


ON_GPUS = Main(
    "full",
    10,
    (
        *("--dataset", "stdlib", "--context", "1024", "--mixed-precision", "bf16", "--dim", "2048", "--heads", "32"),
        *("--layers", "2", "--experts", "128", "--top-k", "8", "--expert-hidden-size", "768", "--lr", "1e-4"),
        # Nothing but steps: the checkpoint at the end of a run is 15 GB.
        *("--epochs", "100", "--eval-every", "100", "--checkpoint.every-steps", "1000", "--no-export"),
        *("--sample-tokens", "8"),
    ),
)
REHEARSAL = Main("debug", 2, ("--cpu", "--context", "32"))
PLACES = {
    "all on every GPU (DDP)": ("--ep-size", "1"),
    "spread over GPUs": (),
}
"""Where experts are, and the flags for it."""


class Failed(Exception):
    """A run ended with an error, or began again; its only argument is what it wrote of that."""


def measure(recipe: str, main: Main, processes: int, *flags: object) -> dict[str, Any]:
    """Run the recipe on `processes` processes; returns a row of the table, shares in percent of a step.

    Raises Failed where it ends with an error, or took smaller micro-batches than it was told.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        command = [sys.executable, str(ROOT / "recipes" / f"{recipe}.py"), main.preset, "--run-dir", folder]
        command += ["--num-processes", processes, "--tracker", "none", *main.flags, *flags]
        command += ["--max-steps", LINES * main.steps_per_line, "--log-every", main.steps_per_line]
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        done = subprocess.run([str(word) for word in command], env=environment, capture_output=True, text=True)
        if done.returncode or RESTART in done.stderr:
            raise Failed(done.stderr)
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


def measure_gpus(gpus: int, *, rehearse: bool) -> Iterator[list[dict[str, Any]]]:
    """Weak scaling of `lm_moe` on 1, 2, 4 ... of so many GPUs: all rows, after each run."""
    main, batch, context = (REHEARSAL, 8, 32) if rehearse else (ON_GPUS, 32, 1024)
    worlds = [2**power for power in range(gpus.bit_length())]  # those above are left idle
    rows: list[dict[str, Any]] = []
    for processes, (place, flags) in product(worlds, PLACES.items()):
        if processes == 1 and rows:  # where experts are is the same
            continue
        row: dict[str, Any] = {"experts": "on one GPU" if processes == 1 else place, "GPUs": processes}
        row |= dict.fromkeys(("tokens per second", "efficiency", *OF_A_STEP, "failed"))
        try:
            found = measure("lm_moe", main, processes, "--batch-size", batch * processes, *flags)
        except Failed as reason:
            words = str(reason).strip().splitlines() or ["without a word"]
            row["failed"] = next((line for line in words if RESTART in line), words[-1])
        else:
            tokens = context * found["samples per second"]
            row |= {"tokens per second": tokens, **{name: found[name] for name in OF_A_STEP}}
            if (alone := (rows or [row])[0]["tokens per second"]) is not None:
                row["efficiency"] = round(tokens / processes / alone, 3)
        rows.append(row)
        yield rows


def draw(figure: Figure, rows: Sequence[dict[str, Any]]) -> None:
    """Samples per second over those of one process; and the share of a step that is spent in collectives."""
    figure.set_size_inches(11, 3.8)
    names = list(dict.fromkeys(row["recipe"] for row in rows))
    rate, share = figure.subplots(1, 2)
    for name, colour in zip(names, palette(len(names)), strict=True):
        line = [row for row in rows if row["recipe"] == name]
        worlds = [row["processes"] for row in line]
        rate.plot(worlds, [row["times one process"] for row in line], color=colour, marker="o", ms=4, label=name)
        share.plot(worlds, [row["collectives and waiting, %"] for row in line], color=colour, marker="o", ms=4)
    cores = os.cpu_count() or 1
    rate.plot(WORLDS, [min(world, cores) for world in WORLDS], color=GREY, ls="--", lw=1, label=f"{cores} cores")
    for axes, title in ((rate, "samples per second / those of one process"), (share, "collectives, % of a step")):
        axes.set_title(title)
        axes.set_xscale("log", base=2)
        axes.set_xticks(WORLDS, [str(world) for world in WORLDS])
        axes.set_xlabel("processes")
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", color=GREY, alpha=0.25, lw=0.6)
    figure.legend(*rate.get_legend_handles_labels(), loc="outside right center")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, help="folder with the data sets; else $TOOLKIT_DATA_DIR or the Hub")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES), help="default: all")
    what.add_argument("--gpus", action="store_true", help="weak scaling of lm_moe on the GPUs of this machine")
    parser.add_argument("--rehearse", action="store_true", help="with --gpus: a tiny model on two CPU processes")
    options = parser.parse_args()
    if options.gpus:
        return main_on_gpus(rehearse=options.rehearse)
    if options.rehearse:
        raise SystemExit("error: --rehearse is for --gpus: add it.")
    rows: list[dict[str, Any]] = []
    data = ("--data-dir", options.data_dir) if options.data_dir is not None else ()
    for recipe in options.recipes:
        alone = 0.0
        for processes in WORLDS:
            try:
                row = measure(recipe, RECIPES[recipe], processes, "--cpu", *data)
            except Failed as reason:
                sys.exit(f"{recipe} on {processes} process(es): {reason}")
            alone = alone or row["samples per second"]
            rows.append(row | {"times one process": round(row["samples per second"] / alone, 2)})
            print(rows[-1], flush=True)
    if len(options.recipes) < len(RECIPES):
        print(markdown(rows))
        return 0
    write_report("scaling", rows)
    save_figure(ROOT / "docs" / "images" / "scaling.png", partial(draw, rows=rows))
    table = markdown(rows)
    put_tables(
        ROOT / "docs" / "experts" / "scaling.md",
        "speed/scaling.py",
        f"<!-- figures: scaling.json by recipe and processes -->\n{table}",
    )
    return 0


def main_on_gpus(*, rehearse: bool) -> int:
    gpus = 2 if rehearse else torch.cuda.device_count()
    if gpus < 2:
        raise SystemExit(f"error: --gpus compares one GPU with several, and this machine has {gpus}: use --rehearse.")
    for rows in measure_gpus(gpus, rehearse=rehearse):
        if rehearse:
            print(rows[-1], flush=True)
        else:  # after each run, so that who ends it has those before
            write_report("scaling_gpus", rows)
    return int(any(row["failed"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
