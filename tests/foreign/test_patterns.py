"""Scripts for plain Accelerate, converted as `docs/train/accelerate.md` says, have the numbers that they had.

The scripts in `patterns/` have the shape of Accelerate's examples by feature, of `run_clm_no_trainer.py` of
transformers, and of loops by hand, made small. Both ways run on two processes: the script as it is, under DDP, and
converted.
"""

from __future__ import annotations

import gc
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState

from tests.support.helpers import ROOT, run_distributed
from toolkit.errors import UserError

PATTERNS = {path.stem: path.read_text() for path in sorted((Path(__file__).parent / "patterns").glob("*.py"))}
PAGE = (ROOT / "docs" / "train" / "accelerate.md").read_text()
(DIFF,) = re.findall(r"<!-- tests/foreign/patterns: all -->\n```diff\n(.*?)```", PAGE, re.DOTALL)
TABLE = dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", PAGE, re.MULTILINE))
REFUSED = {name for name, lines in TABLE.items() if lines == "raises"}


def converted(name: str) -> tuple[str, int]:
    """The script with the page's diff applied, and how many of its lines are new."""
    text, new = PATTERNS[name], 0
    for hunk in DIFF.strip("\n").split("\n\n"):
        lines = hunk.split("\n")
        before = [line[1:] for line in lines if line[0] in " -"]
        after = [line[1:] for line in lines if line[0] in " +"]
        if not (found := re.search("^( *)" + r"\n\1".join(map(re.escape, before)) + "$", text, re.MULTILINE)):
            found = re.search(r"^()from accelerate import .*$", text, re.MULTILINE)
            assert found, (name, hunk)
            after = [found[0], *after[1:]]
        text = text.replace(found[0], "\n".join(found[1] + line for line in after), 1)
        new += sum(line[0] == "+" for line in lines)
    return text, new


def run_all(scripts: dict[str, str], folder: Path) -> dict[str, Any]:
    """What the scripts leave in `results`, as numbers; or the sentence of a UserError."""
    # Its end_training() leaves the process group, which is not its own, to the next script.
    os.environ.update(ACCELERATE_USE_CPU="true", FORK_LAUNCHED="1")
    found: dict[str, Any] = {}
    for name, text in scripts.items():
        AcceleratorState._reset_state()
        GradientState._reset_state()
        os.environ["FOREIGN_FOLDER"] = str(folder / name)
        os.makedirs(folder / name, exist_ok=True)
        torch.manual_seed(0)
        script: dict[str, Any] = {"__name__": "__main__"}
        try:
            exec(compile(text, f"{name}.py", "exec"), script)
            found[name] = [float(value) for value in script["results"]]
        except UserError as error:
            found[name] = str(error)
        script.clear()
        gc.collect()
    return found


def compare(names: list[str], folder: Path) -> None:
    scripts = {name: converted(name) for name in names}
    trained = {name: PATTERNS[name] for name in names if name not in REFUSED}
    plain = run_distributed(run_all, 2, trained, folder / "plain")
    ours = run_distributed(run_all, 2, {name: text for name, (text, _) in scripts.items()}, folder / "ours")
    counts = {name: new for name, (_, new) in scripts.items() if name not in REFUSED}
    print(f"new lines: {counts}; refused: {sorted(REFUSED & scripts.keys())}")  # noqa: T201
    for rank, its in zip(plain, ours, strict=True):
        for name, (_, new) in scripts.items():
            if name in REFUSED:
                assert isinstance(its[name], str), name
                assert "\n" not in its[name]
                continue
            assert TABLE[name] == str(new), f"{name}: {new} new lines"
            tolerance = 1e-2 if name == "ddp_comm_hook" else 1e-6 if name == "run_clm_no_trainer" else 1e-10
            assert its[name] == pytest.approx(rank[name], rel=tolerance, abs=tolerance), name


def test_patterns_need_two_lines_and_have_the_numbers_of_plain_accelerate(tmp_path: Path):
    assert TABLE.keys() == PATTERNS.keys()
    compare([name for name in PATTERNS if name != "run_clm_no_trainer"], tmp_path)


def test_a_language_model_of_transformers_needs_two_lines(tmp_path: Path):
    compare(["run_clm_no_trainer"], tmp_path)
