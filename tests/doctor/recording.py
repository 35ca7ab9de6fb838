"""Records of the doctor's recorder on gloo processes."""

from pathlib import Path

from benchmarks.support.processes import run_distributed
from toolkit.doctor.compare import Evidence
from toolkit.doctor.record import read_records
from toolkit.doctor.recorder import Variant
from toolkit.doctor.watch import watch

STEPS = 3


def record(folder: Path, world: int, script: Path | str, *args: str, variant: Variant = "as it is") -> Evidence:
    """Run the first steps of `script` on `world` processes, and return their records, which are in `folder`."""
    folder.mkdir()
    run_distributed(_watch, world, str(folder), str(script), list(args), variant)
    return Evidence(read_records(folder))


def _watch(folder: str, script: str, args: list[str], variant: Variant) -> None:
    watch(Path(folder), STEPS, script, args, variant)
