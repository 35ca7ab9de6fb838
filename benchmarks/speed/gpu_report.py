"""What one GPU can tell in 25 minutes: the tests and benchmarks that need one, and a page of what they found.

    python benchmarks/speed/gpu_report.py                on a GPU
    python benchmarks/speed/gpu_report.py --minutes 10   the same, ended earlier
    python benchmarks/speed/gpu_report.py --rehearse     anywhere: tiny sizes, no records

Parts run one after another, each in a process of its own that is interrupted where its time is over, as by Ctrl-C,
which has pytest say what it found: what a part printed and recorded until then stays. The page, build/gpu-report.md, is
written anew after each part, and after Ctrl-C or SIGTERM, which end the report. Records are those of the benchmarks, in
benchmarks/results/. Exit code 1 where a part failed or missed a goal.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.report import COMMIT, machine
from toolkit.run.summary import duration

PAGE = ROOT / "build" / "gpu-report.md"
GRACE = 0.05
"""Of a part's time: how long it may take to end once it was interrupted."""


@dataclass(frozen=True)
class Part:
    """A command of this repository."""

    title: str
    words: tuple[str, ...]
    """After `python`."""
    rehearsal: tuple[str, ...]
    """Words in addition, where sizes are tiny."""
    share: float
    """Of the time, at most, unless earlier parts left some of theirs."""


def _gpu_tests() -> tuple[str, ...]:
    marked = sorted(path for path in (ROOT / "tests").rglob("*.py") if "mark.gpu" in path.read_text(encoding="utf-8"))
    words = ("-m", "pytest", "-m", "gpu", "-rs", "--tb=short", "--durations=10")
    return (*words, *(str(path.relative_to(ROOT)) for path in marked))


SHORT = ("--rehearse", "--rounds", "1", "--steps", "2", "--warmup", "1", "--curve", "10")
PARTS = [
    Part("The layer", ("benchmarks/speed/gpu_layer.py", "--rounds", "10"), ("--rehearse", "--rounds", "1"), 0.2),
    Part("Training", ("benchmarks/speed/gpu_training.py", "--rounds", "2", "--curve", "100"), SHORT, 0.3),
    Part("Fine-tuning", ("benchmarks/speed/gpu_training.py", "--adapters", "--rounds", "2"), SHORT, 0.2),
    Part("Tests", _gpu_tests(), ("--collect-only",), 0.3),
]


@dataclass(frozen=True)
class Outcome:
    """How a part ended."""

    part: Part
    seconds: float
    code: int | None
    """None where it was interrupted."""
    printed: str

    def text(self) -> str:
        """Its section of the page."""
        ends = {None: "ended, because its time was over,", 0: "done"}.get(
            self.code, f"ended with exit code {self.code}"
        )
        words = " ".join(["python", *self.part.words])
        return f"## {self.part.title}\n\n`{words}`: {ends} after {duration(self.seconds)}.\n\n{self.printed.strip()}\n"


def run(part: Part, seconds: float, *, rehearse: bool) -> Outcome:
    """Run `part` for at most so many seconds."""
    began = time.monotonic()
    words = [sys.executable, *part.words, *(part.rehearsal if rehearse else ())]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}  # what is killed keeps what it has printed
    # A file, because a process that outlives the part would hold a pipe open.
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            words, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        code = None
        try:
            code = process.wait((1 - GRACE) * seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE * seconds)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and the processes that it started
            process.wait()
        output.seek(0)
        printed = output.read().decode(errors="replace")
    return Outcome(part, time.monotonic() - began, code, printed)


def write_page(outcomes: Sequence[Outcome]) -> None:
    about = "\n".join(f"- {name}: {value}" for name, value in {"commit": COMMIT, **machine()}.items())
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(
        f"# On one GPU\n\n{about}\n\n" + "\n".join(outcome.text() for outcome in outcomes), encoding="utf-8"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=25.0, help="after which all is ended (25)")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes on whatever device there is")
    options = parser.parse_args()
    if not options.rehearse and machine()["gpu"] is None:
        raise SystemExit("error: this machine has no GPU: use --rehearse to see that the report runs.")
    ends, outcomes = time.monotonic() + 60 * options.minutes, list[Outcome]()
    for place, part in enumerate(PARTS):
        left, shares = ends - time.monotonic(), sum(other.share for other in PARTS[place:])
        outcomes.append(run(part, max(0.0, left * part.share / shares), rehearse=options.rehearse))
        print(outcomes[-1].text(), flush=True)
        write_page(outcomes)
    print(f"the page is {os.path.relpath(PAGE)}")
    return int(any(outcome.code not in (0, None) for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
