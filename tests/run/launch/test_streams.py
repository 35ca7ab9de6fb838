"""Programs that are started with closed streams, or print what an encoding lacks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.helpers import ROOT

PRINTS = """
import sys
from toolkit.run.launch.streams import prepare_streams
prepare_streams()
with open(sys.argv[1], "w") as file:
    print("h\\u00fc\\udcff", flush=True)
    sys.stderr.write("lost")
    assert sys.stdin.read() == ""
    file.write("kept")
"""


def test_a_closed_stream_is_the_null_device_and_no_file_of_the_run(tmp_path: Path):
    words = ["bash", "-c", 'exec "$@" <&- >&- 2>&-', "bash", sys.executable, "-c", PRINTS, tmp_path / "file"]
    assert subprocess.run(words, cwd=ROOT, check=False).returncode == 0
    assert (tmp_path / "file").read_text() == "kept"


def test_what_an_encoding_lacks_is_printed_with_escapes(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-c", PRINTS, tmp_path / "file"],
        cwd=ROOT,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "h\\xfc\\udcff\n"
