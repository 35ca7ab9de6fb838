"""Scripts for plain Accelerate, converted by the diff of `docs/train/accelerate.md`, keep their numbers.

The scripts in `patterns/` follow Accelerate's examples by feature, `run_clm_no_trainer.py` of transformers, and loops
of users. Script and converted script run on two processes.
"""

import gc
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState

from benchmarks.support.processes import ROOT, run_distributed
from toolkit.errors import UserError

PATTERNS = {path.stem: path.read_text() for path in sorted((Path(__file__).parent / "patterns").glob("*.py"))}
PAGE = (ROOT / "docs" / "train" / "accelerate.md").read_text()
(DIFF,) = re.findall(r"<!-- tests/foreign/patterns: all -->\n```diff\n(.*?)```", PAGE, re.DOTALL)
TABLE = dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", PAGE, re.MULTILINE))
"""Number of new lines by pattern, or "raises"."""
TOLERANCES = {"ddp_comm_hook": 1e-2, "run_clm_no_trainer": 1e-6}


def convert(name: str) -> tuple[str, int]:
    """Return the script with the diff applied, and the number of new lines."""
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
    """Return the numbers in `results` of each script, or its UserError."""
    # With FORK_LAUNCHED, end_training() keeps the process group for the next script.
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


def test_converted_scripts_have_two_new_lines_and_equal_numbers(tmp_path: Path):
    assert TABLE.keys() == PATTERNS.keys()
    converted = {name: convert(name) for name in PATTERNS}
    supported = {name: text for name, text in PATTERNS.items() if TABLE[name] != "raises"}
    plain = run_distributed(run_all, 2, supported, tmp_path / "plain")
    sharded = run_distributed(run_all, 2, {n: text for n, (text, _) in converted.items()}, tmp_path / "sharded")
    for expected, found in zip(plain, sharded, strict=True):
        for name, (_, new) in converted.items():
            if name in supported:
                assert TABLE[name] == str(new), f"{name}: {new} new lines"
                tolerance = TOLERANCES.get(name, 1e-10)
                assert found[name] == pytest.approx(expected[name], rel=tolerance, abs=tolerance), name
            else:
                assert isinstance(found[name], str), name
                assert "\n" not in found[name]
