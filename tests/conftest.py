"""Fixtures of several folders."""

import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

from toolkit.launch import children

# Before torch is imported. Workers share the cores, and threads that wait for each other there double the time.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A suite that passed passes again: properties are tried on the same cases each time. `make fuzz` looks for new ones.
# No deadline, as the machine may be busy, and no store of failures beside the code.
settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.register_profile("fuzz", deadline=None, database=None, print_blob=True)
settings.load_profile("repeatable")


@pytest.fixture
def restored_signals() -> Iterator[None]:
    """The handlers that a recipe's command line sets are undone after the test."""
    before = {number: signal.getsignal(number) for number in children.STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
