"""Settings and fixtures of all tests."""

import gc
import os
import signal
from collections.abc import Iterator

import huggingface_hub
import jaxtyping
import pytest
from hypothesis import settings

from benchmarks.support.processes import fork_context
from toolkit.run.launch.signals import HANDLED

# Set before torch is imported: workers share the cores, so more threads would double the time.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A shell that starts the suite in the background ignores SIGINT in it, and child processes inherit this.
signal.signal(signal.SIGINT, signal.default_int_handler)
fork_context.set_forkserver_preload(["tests.support.preloaded"])

# Repeatable: the same cases in each run, without a deadline or files. `make fuzz` tries new cases.
settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.register_profile("fuzz", deadline=None, database=None, print_blob=True)
settings.load_profile("repeatable")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort files that start processes first: they take longest, and workers end at about the same time."""
    starts = {"run_distributed", "run_recipe", "run_forked", "subprocess"}
    items.sort(key=lambda item: not starts & vars(item.getparent(pytest.Module).obj).keys())


def pytest_collection_finish() -> None:
    """Exclude imported objects from garbage collection, to save time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def restored_signals() -> Iterator[None]:
    """Restore the signal handlers that command lines and runs replace."""
    before = {number: signal.getsignal(number) for number in HANDLED}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def unchecked_shapes() -> Iterator[None]:
    """Disable jaxtyping's shape checks, which torch.compile cannot trace."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Allow requests to the Hub, without a proxy and with a new client."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    huggingface_hub.close_session()
    yield
    huggingface_hub.close_session()
