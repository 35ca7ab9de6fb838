"""Peak memory of a process."""

import subprocess
import sys

import pytest

from benchmarks.support.processes import ROOT

CHILD = """
from types import SimpleNamespace
from toolkit.run.hardware import peak_bytes
print(peak_bytes(SimpleNamespace(type="cpu")))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux keeps the peak of the parent in `ru_maxrss`")
def test_peak_bytes_excludes_parent_process():
    buffer = bytearray(2**29)
    buffer[::4096] = b"1" * 2**17  # a page is allocated when it is written
    done = subprocess.run([sys.executable, "-c", CHILD], cwd=ROOT, capture_output=True, text=True, check=True)
    assert 0 < int(done.stdout) < len(buffer)
