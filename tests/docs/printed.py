"""Blocks marked `run` in the documentation, and the output that follows them.

    python -m tests.docs.printed [PAGE ...]    write the output below each block

In an output, a line `...` stands for any lines. Numbers agree within `TOLERANCE`; times and rates are not compared.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from benchmarks.support.processes import ROOT
from tests.support.forked_python import forked_commands

PAGES = sorted(p for p in ROOT.glob("**/*.md") if not {".venv", "runs", "build"} & set(p.relative_to(ROOT).parts))
FENCE = re.compile(
    r"^```(?P<language>bash|python) run\n(?P<code>.*?)^```$(?P<shown>\n\n```text\n(?P<output>.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)
VARYING = re.compile(r"(?<=\| )[\d.]+(?= \|$)|(?:\d[\d,.]* ?(?:s|ms|min|h|samples/s|[KMG]i?B)\b ?)+|(?<=eta )[\d:]+")
"""Times, rates and memory, and the last column of a table, which has times."""
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[-+]\d+)?")
TOLERANCE = 0.2
"""Relative difference of numbers, which processors round differently."""


class Block(NamedTuple):
    """A block that is run, and the output that the page shows, if any."""

    language: str
    code: str
    output: str | None


def blocks_of(text: str) -> list[tuple[re.Match[str], Block]]:
    """Return the blocks of a page, and their places."""
    return [(each, Block(each["language"], each["code"], each["output"])) for each in FENCE.finditer(text)]


@contextmanager
def checkout() -> Iterator[tuple[Path, Path]]:
    """Yield a folder with the structure of the repository, which receives the runs, and a folder with commands."""
    with tempfile.TemporaryDirectory() as folder:
        root, commands = Path(folder, "checkout"), Path(folder, "commands")
        root.mkdir()
        commands.mkdir()
        for name in ("recipes", "accelerate_configs", "toolkit", "Makefile", "pyproject.toml", "benchmarks", "docs"):
            (root / name).symlink_to(ROOT / name)
        with forked_commands(commands):
            yield root, commands


def run_block(block: Block, root: Path, commands: Path) -> str:
    """Run a block in `root` and return what it prints to stdout, with paths relative to `root`."""
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(commands), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": str(ROOT),
        "VENV": sys.prefix,
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",  # forked ranks do not read the launcher's flags
        "WANDB_MODE": "disabled",  # its service takes longer to start than the runs
    }
    shells = {"bash": ["bash", "-euo", "pipefail", "-c"], "python": [str(commands / "python"), "-c"]}
    command = [*shells[block.language], block.code]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{block.code}\n{done.stdout}\n{done.stderr}"
    return done.stdout.replace(f"{root}/", "")


def agree(shown: str, printed: str) -> bool:
    """Whether two lines agree but for spaces, times, and for numbers within `TOLERANCE` or the last digit."""
    shown, printed = (VARYING.sub("...", re.sub(" +", " ", line)) for line in (shown, printed))
    if NUMBER.sub("#", shown) != NUMBER.sub("#", printed):
        return False
    for pair in zip(NUMBER.findall(shown), NUMBER.findall(printed), strict=True):
        a, b = (float(number.replace(",", "")) for number in pair)
        if not math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=10.0 ** -len(pair[0].partition(".")[2])):
            return False
    return True


def first_missing(shown: str, printed: str) -> str | None:
    """Return the first line of `shown` that `printed` does not have at its place."""
    lines, at, skips = [line.rstrip() for line in printed.splitlines()], 0, False
    for line in shown.splitlines():
        if line == "...":
            skips = True
            continue
        places = range(at, len(lines)) if skips else range(at, min(at + 1, len(lines)))
        found = next((place for place in places if agree(line, lines[place])), None)
        if found is None:
            return line
        at, skips = found + 1, False
    return None if skips or at == len(lines) else f"the end before: {lines[at]}"


def main(pages: Sequence[str]) -> int:
    sys.path.append(str(ROOT / "recipes"))  # forks do not read PYTHONPATH
    with checkout() as (root, commands):
        for page in [Path(name).resolve() for name in pages] or PAGES:
            text, at, written = page.read_text(), 0, []
            for match, block in blocks_of(text):
                printed = run_block(block, root, commands)
                is_shown = block.output is not None and first_missing(block.output, printed) is None
                new = (match["shown"] if is_shown else f"\n\n```text\n{printed}```") if printed else ""
                written += [text[at : match.end("code")], "```", new]
                at = match.end()
            page.write_text("".join([*written, text[at:]]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
