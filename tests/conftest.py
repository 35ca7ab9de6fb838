"""Fixtures of several folders."""

import gc
import os
import signal
from collections.abc import Iterator

import huggingface_hub
import jaxtyping
import pytest
from hypothesis import settings

from toolkit.run.launch.signals import HANDLED

# Before torch is imported. Workers share the cores, and threads that wait for each other there double the time.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A shell that starts the suite in the background has it ignore Ctrl-C, and so whatever a test sends a signal to.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A suite that passed passes again: properties are tried on the same cases each time. `make fuzz` looks for new ones.
# No deadline, as the machine may be busy, and no store of failures beside the code.
settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.register_profile("fuzz", deadline=None, database=None, print_blob=True)
settings.load_profile("repeatable")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that start processes come first: they take longest, and at the end one worker would wait for another."""
    starts = {"run_distributed", "run_recipe", "run_forked", "subprocess"}
    items.sort(key=lambda item: not starts & vars(item.getparent(pytest.Module).obj).keys())


def pytest_collection_finish() -> None:
    """The garbage collector leaves what was imported alone: else each of its rounds would walk through it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def restored_signals() -> Iterator[None]:
    """Handlers that a command line or a run that was stopped leaves behind are undone after the test."""
    before = {number: signal.getsignal(number) for number in HANDLED}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def unchecked_shapes() -> Iterator[None]:
    """For what torch.compile traces: it cannot follow the check of shapes."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The Hub may be asked, without a proxy, by a client that was made for this test."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    huggingface_hub.close_session()
    yield
    huggingface_hub.close_session()
