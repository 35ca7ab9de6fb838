"""Fixtures of several folders."""

import os
import signal
from collections.abc import Iterator

import pytest

from toolkit import launch

# Before torch is imported. Workers share the cores, and threads that wait for each other there double the time.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture
def restored_signals() -> Iterator[None]:
    """The handlers that a recipe's command line sets are undone after the test."""
    before = {number: signal.getsignal(number) for number in launch.STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
