"""What a process knows of its own memory."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.helpers import ROOT

CHILD = """
from types import SimpleNamespace
from toolkit.run.hardware import peak_bytes
print(peak_bytes(SimpleNamespace(type="cpu")))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux keeps the peak of the parent in `ru_maxrss`")
def test_the_peak_of_a_process_is_not_that_of_its_parent():
    mine = bytearray(2**29)
    mine[::4096] = b"1" * 2**17  # a page is there once it is written
    done = subprocess.run([sys.executable, "-c", CHILD], cwd=ROOT, capture_output=True, text=True, check=True)
    assert 0 < int(done.stdout) < len(mine)
