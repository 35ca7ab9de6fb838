"""How large the page of `toolkit report` is for ten runs, and how soon headless Chromium has drawn it.

    python benchmarks/speed/report_page.py                          trains ten short runs first: minutes
    python benchmarks/speed/report_page.py --runs runs/sweep/*      runs that are there
    python benchmarks/speed/report_page.py --screenshots docs/images

The time is the browser's own, from the start of the navigation until every plot in the window is drawn; a fresh browser
each time, light and dark in turn. Fails where the page is above 5 MB, the median above 2 s, or the console not empty.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.report import ROOT, write_report
from tests.commands.report.chromium import Tab, chromium
from toolkit.commands import main as toolkit_command

MOST_MB, MOST_SECONDS = 5.0, 2.0
WIDTH, HEIGHT = 1280, 1650
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
DRAWN = "new Promise(done => { const wait = () => document.body.dataset.drawnAfter && !waiting ? done() : "
DRAWN += "setTimeout(wait, 20); wait(); })"
"""Ends when the plots in the window are drawn."""


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


def opened(tab: Tab, page: Path, scheme: str) -> dict[str, Any]:
    """Open `page` and wait for what is in sight; seconds and plots."""
    tab.show(scheme, WIDTH, HEIGHT)
    tab.open(page)
    tab.run(DRAWN)
    errors = [line for line in tab.console if "setting log level" not in line]
    assert errors == [], errors
    return {
        "scheme": scheme,
        "seconds": int(tab.run("document.body.dataset.drawnAfter")) / 1e3,
        "plots drawn": int(tab.run("document.body.dataset.plots")),
    }


def take_screenshot(tab: Tab, folder: Path, scheme: str) -> None:
    """What docs show: light the top of the page, dark the part on experts, half way through the run that moves them."""
    if scheme == "dark":
        tab.run("document.getElementById('experts').scrollIntoView()")
        tab.run("new Promise(done => { const wait = () => heat ? done() : setTimeout(wait, 20); wait(); })")
        tab.run(
            "(() => { const run = document.getElementById('run');"
            "run.value = [...run.options].findIndex(option => option.text.endsWith('moving'));"
            "run.dispatchEvent(new Event('change')); const step = document.getElementById('step');"
            "step.value = step.max / 2; step.dispatchEvent(new Event('input')); })()"
        )
        tab.run("new Promise(done => setTimeout(done, 500))")
    (folder / f"report_{scheme}.png").write_bytes(tab.screenshot())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", type=Path, help="folders of runs, in place of ten short ones")
    parser.add_argument("--steps", type=int, default=800, help="of each of the ten")
    parser.add_argument("--rounds", type=int, default=5, help="browsers for each of light and dark")
    parser.add_argument(
        "--screenshots", type=Path, help="a folder for report_light.png and report_dark.png; no record then"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        runs = args.runs or train(Path(place) / "runs", args.steps)
        page = Path(place) / "report.html"
        if code := toolkit_command(["report", *map(str, runs), "--output", str(page)]):
            return code
        megabytes = page.stat().st_size / 1e6
        rows = []
        for number in range(1 if args.screenshots else args.rounds):
            for scheme in ("light", "dark"):
                with chromium(Path(place) / f"profile-{number}-{scheme}") as tab:
                    rows.append({"round": number + 1, **opened(tab, page, scheme)})
                    if args.screenshots:
                        take_screenshot(tab, args.screenshots, scheme)
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
