"""Which faults of adapters are found by `toolkit adapter verify`, by `toolkit doctor`, and by digests of files.

    python benchmarks/faults/adapter_faults.py                                two minutes
    python benchmarks/faults/adapter_faults.py "moments lost in a move"       one of them, which is not written down

Faults of training are switched on in `adapter_training.py`, those of files are made in what its corrected twin saved.
Digests are taken as a checkpoint takes them, after the fault, of the files that are there.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.report import write_report
from tests.integrations.peft.faults import SETTINGS, WEIGHTS, digests_find_damage, drop_from_merged
from tests.support.helpers import run_distributed
from toolkit.commands import main as run_command
from toolkit.doctor.compare import TOLERANCES, Evidence
from toolkit.doctor.examine import judge
from toolkit.doctor.record import read_records
from toolkit.doctor.watch import watch

SCRIPT = Path(__file__).with_name("adapter_training.py")
STEPS = 3
CLEAN, DROPPED = "none", "delta dropped on merge"
OF_FILES = (
    "one eighth of the rows",
    "experts in another order",
    "the rows of rank 0 alone",
    "numbers that are not finite",
    "scaling lost",
    "an older layout",
)
OF_TRAINING = {
    "each rank its own adapter": "unsynchronised replica",
    "frozen while claimed trained": "adapter frozen",
    "averaged over all ranks": "wrong gradients",
    "moments lost in a move": "stale optimizer row after a move",
    "scaling lost in training": "gradients too small",
}
"""What the doctor is to call it."""


def make_base(folder: Path) -> None:
    import torch

    from tests.integrations.peft.models import config
    from tests.integrations.transformers.families import awaken
    from toolkit.integrations.transformers import causal_lm

    torch.manual_seed(0)
    model: Any = awaken(causal_lm(config("olmoe")))
    model.save_pretrained(folder)


def train_in_rank(words: list[str]) -> None:
    import runpy

    sys.argv = [str(SCRIPT), *words]
    runpy.run_path(str(SCRIPT), run_name="__main__")


def watch_in_rank(folder: str, fault: str, rounding: float) -> None:
    watch(Path(folder), STEPS, str(SCRIPT), [fault], rounding)


def by_doctor(fault: str) -> str:
    """The finding's name, or nothing."""
    with tempfile.TemporaryDirectory() as folder:

        def run(of: str, world: int, rounding: float = 0.0) -> Evidence:
            where = Path(folder) / of
            where.mkdir()
            run_distributed(watch_in_rank, world, str(where), fault, rounding)
            return Evidence(read_records(where))

        comparison, found = judge(run("alone", 1), run("together", 2), TOLERANCES["no"], run)
        return found[0].name if found else "" if comparison.ok else "differs"


def by_verify(folder: Path, base: Path, merged: Path | None = None) -> str:
    """The first fault that it names, or nothing."""
    words = ["adapter", "verify", str(folder), "--base", str(base), *(["--merged", str(merged)] if merged else [])]
    with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.redirect_stdout(io.StringIO()):
        code = run_command(words)
    assert code in (0, 2)
    lines = [line for line in said.getvalue().splitlines() if line.startswith("fault: ")]
    return lines[0].removeprefix("fault: ").replace(f"{folder.parent}/", "") if code else ""


def spoil(name: str, folder: Path) -> None:
    """Make a fault of files in a folder of adapters."""
    from safetensors.torch import load_file, save_file

    if name in WEIGHTS:
        tensors = load_file(folder / "adapter_model.safetensors")
        WEIGHTS[name][0](tensors)
        save_file(tensors, folder / "adapter_model.safetensors")
    else:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | SETTINGS[name][0]))


def examine(name: str, place: Path) -> dict[str, Any]:
    """One row. `place` has the base, and what was trained without a fault in `clean` and `merged`."""
    base, folder, merged = place / "base", place / name, None
    if name in OF_TRAINING:
        run_distributed(train_in_rank, 2, [name, str(base), str(folder)])
    else:
        shutil.copytree(place / "clean", folder)
    if name == DROPPED:
        merged = place / "without the experts"
        drop_from_merged(base, place / "merged", merged)
    elif name not in OF_TRAINING and name != CLEAN:
        spoil(name, folder)
    return {
        "fault": name,
        "arises": "training" if name in OF_TRAINING else "merging" if merged else "" if name == CLEAN else "saving",
        "adapter verify": by_verify(folder, base, merged),
        "doctor": by_doctor(name) if name in OF_TRAINING or name == CLEAN else "",
        "digests": "damaged" if digests_find_damage(merged or folder) else "",
    }


def rows(names: list[str]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        run_distributed(make_base, 1, place / "base")
        run_distributed(train_in_rank, 2, [CLEAN, str(place / "base"), str(place / "clean"), str(place / "merged")])
        return [examine(name, place) for name in names]


def problems(found: list[dict[str, Any]]) -> list[str]:
    """What is not as it should be: a fault that neither names, a digest that finds one, an alarm without a fault."""
    wrong = []
    for row in found:
        name, said = row["fault"], (row["adapter verify"], row["doctor"])
        if row["digests"] or any(said) != (name != CLEAN):
            wrong.append(f"{name}: {row}")
        if name in OF_TRAINING and row["doctor"] != OF_TRAINING[name]:
            wrong.append(f"{name}: the doctor says {row['doctor']!r}")
    return wrong


def main() -> None:
    names = [CLEAN, *OF_TRAINING, *OF_FILES, DROPPED]
    parser = argparse.ArgumentParser()
    parser.add_argument("fault", nargs="?", choices=names)
    chosen = parser.parse_args().fault
    found = rows([chosen] if chosen else names)
    for row in found:
        print(row)
    if chosen is None:
        write_report("adapter_faults", found)
    if wrong := problems(found):
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
