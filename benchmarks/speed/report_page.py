"""How large the page of `toolkit report` is for ten runs, and how soon headless Chromium has drawn it.

    python benchmarks/speed/report_page.py                          trains ten short runs first: minutes
    python benchmarks/speed/report_page.py --runs runs/sweep/*      runs that are there
    python benchmarks/speed/report_page.py --screenshots docs/images

The time is the browser's own, from the start of the navigation until Bokeh has drawn the first tab; a fresh browser
each time. Fails where the page is above 5 MB, the median above 2 s, or the console not empty.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.report import ROOT, write_report
from tests.commands.report.chromium import Tab, chromium
from toolkit.commands import main as toolkit_command

MOST_MB, MOST_SECONDS = 5.0, 2.0
WIDTH, HEIGHT = 1280, 900
"""Of the window, in pixels."""
RUNS = {
    "one-a": ["full"],
    "one-b": ["full", "--seed", "1"],
    "one-c": ["full", "--seed", "2"],
    "two-a": ["full", "--num-processes", "2"],
    "two-b": ["full", "--num-processes", "2", "--seed", "1"],
    "moving": [
        *("full", "--num-processes", "2"),
        *["--replan.planner", "swap", "--replan.every", "50", "--replan.no-guarded"],
    ],
    "fast": ["full", "--lr", "8e-3"],
    "top2": ["top2"],
    "dense": ["dense"],
    "dynamic": ["dynamic"],
}
"""Name -> flags of mnist_moe."""
SCREENSHOTS = {"report_curves": "Mixture of experts", "report_experts": "Expert load and placement"}
"""Picture of the docs -> the tab that it shows."""


def train(folder: Path, steps: int) -> list[Path]:
    """The runs of `RUNS`, each with 400 lines of metrics or so."""
    for name, flags in RUNS.items():
        usual = [
            "--max-steps",
            str(steps),
            "--log-every",
            "2",
            "--cpu",
            "--tracker",
            "none",
            "--run-dir",
            folder / name,
        ]
        command = [sys.executable, ROOT / "recipes" / "mnist_moe.py", *flags, *usual]
        subprocess.run([str(word) for word in command], check=True, stdout=subprocess.DEVNULL)
    return [folder / name for name in RUNS]


def opened(tab: Tab, page: Path) -> float:
    """Open `page` and wait until it is drawn; returns the browser's seconds."""
    tab.show("light", WIDTH, HEIGHT)
    tab.open(page)
    seconds = tab.wait_until_drawn()
    errors = [line for line in tab.console if "[bokeh" not in line]
    assert errors == [], errors
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", type=Path, help="folders of runs, in place of ten short ones")
    parser.add_argument("--steps", type=int, default=800, help="of each of the ten")
    parser.add_argument("--rounds", type=int, default=10, help="browsers")
    parser.add_argument("--screenshots", type=Path, help=f"a folder for {' and '.join(SCREENSHOTS)}; no record then")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        runs = args.runs or train(Path(place) / "runs", args.steps)
        page = Path(place) / "report.html"
        if code := toolkit_command(["report", *map(str, runs), "--output", str(page)]):
            return code
        megabytes = page.stat().st_size / 1e6
        rows = []
        for number in range(1 if args.screenshots else args.rounds):
            with chromium(Path(place) / f"profile-{number}") as tab:
                rows.append({"round": number + 1, "seconds": opened(tab, page)})
                for name, title in SCREENSHOTS.items() if args.screenshots else ():
                    tab.choose(title)
                    (args.screenshots / f"{name}.png").write_bytes(tab.screenshot())
    seconds = statistics.median(row["seconds"] for row in rows)
    holds = megabytes < MOST_MB and seconds < MOST_SECONDS
    print(
        f"{len(runs)} runs, {megabytes:.2f} MB, drawn after {seconds:.2f} s (median): {'holds' if holds else 'FAILS'}"
    )
    if not args.screenshots:
        write_report("report_page", rows, runs=len(runs), **{"page MB": round(megabytes, 2), "median seconds": seconds})
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
