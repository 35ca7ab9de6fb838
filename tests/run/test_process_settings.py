"""Settings of the process, and its peak memory."""

import ctypes
import subprocess
import sys

import pytest
import torch

from benchmarks.support.processes import ROOT
from toolkit.run.process_settings import flushes_subnormals, process_settings

has_glibc = sys.platform == "linux" and hasattr(ctypes.CDLL(None), "gnu_get_libc_version")
MAPPED_AGAIN = """
import ctypes, resource
from toolkit.run.process_settings import process_settings

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
SIZE = 64 * 2**20  # glibc always maps buffers above 32 MiB separately

def use_buffer():
    buffer = libc.malloc(SIZE)
    ctypes.memset(buffer, 1, SIZE)
    libc.free(buffer)

def faults():
    "Return the pages that the kernel maps for ten uses of a large buffer."
    use_buffer()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        use_buffer()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(faults())
with process_settings():
    with process_settings():
        pass
    print(faults())
print(faults())
"""


@pytest.mark.parametrize("before", [False, True])
def test_subnormals_are_flushed_inside_and_setting_is_restored(before):
    torch.set_flush_denormal(before)
    try:
        with process_settings():
            assert flushes_subnormals()
            assert torch.full((8,), 1e-30).mul(1e-10).eq(0).all()
            with process_settings():
                assert flushes_subnormals()
            assert flushes_subnormals()
        assert flushes_subnormals() == before
        with pytest.raises(RuntimeError, match="a step failed"), process_settings():
            raise RuntimeError("a step failed")
        assert flushes_subnormals() == before
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.skipif(not has_glibc, reason="needs glibc")
def test_freed_memory_is_kept_inside_and_returned_outside():
    done = subprocess.run([sys.executable, "-c", MAPPED_AGAIN], cwd=ROOT, capture_output=True, text=True, check=True)
    before, inside, after = (int(line) for line in done.stdout.split())
    assert inside < before / 2
    assert inside < after / 2


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
