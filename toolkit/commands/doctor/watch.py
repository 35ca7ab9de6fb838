"""Run a script under the recorder: `python -m toolkit.commands.doctor.watch OUT STEPS ROUNDING WAIT SCRIPT [ARGUMENT ...]`."""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import traceback
from pathlib import Path

from toolkit.commands.doctor.attach import attach, limit_waits
from toolkit.commands.doctor.record import Record
from toolkit.commands.doctor.recorder import Finished, Recorder


def watch(out: Path, steps: int, script: str, args: list[str], rounding: float = 0.0) -> Record:
    """Run `script` as if from the command line, and leave it once `steps` optimizer steps were seen."""
    recorder = Recorder(out, steps, rounding)
    attach(recorder)
    sys.argv = [script, *args]
    sys.path[0] = str(Path(script).resolve().parent)
    with contextlib.suppress(Finished):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as stop:
            if stop.code not in (None, 0):
                raise
    if not recorder.done:  # it came to its end before
        if recorder._open_step and recorder.record.phases:
            recorder.take_phase()
        recorder.finish()
    return recorder.record


def main() -> None:
    out, steps, rounding, wait_s, script, *args = sys.argv[1:]
    limit_waits(float(wait_s))
    code = 0
    try:
        watch(Path(out), int(steps), script, args, float(rounding))
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # without destroying the process group: another rank may never get there


if __name__ == "__main__":
    main()
