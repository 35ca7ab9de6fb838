"""Isolation of training from faults of a tracker."""

import threading
from functools import partial

import pytest

from toolkit.run.tracking import guard
from toolkit.run.tracking.guard import GuardedTracker, expand


class Backend:
    """Backend that records its calls; `faults` maps a call to an error, or to "hang"."""

    name = "fake"

    def __init__(self, **faults):
        self.faults, self.calls, self.released = faults, [], threading.Event()

    def __getattr__(self, call):
        return partial(self._do, call)

    def _do(self, call, *args, **kwargs):
        self.calls.append((call, *args, *kwargs.values()))
        fault = self.faults.get(call)
        if call == "kill":
            self.released.set()
        elif fault == "hang":
            self.released.wait()
        elif fault is not None:
            raise fault
        return "hello" if call == "start" else None


def run_with(backend, steps=3):
    """Log `steps` steps and return the printed messages."""
    messages = []
    tracker = GuardedTracker(backend, messages.append)
    for step in range(steps):
        tracker.log({"a": [1.0, 2.0]}, step)
    tracker.close()
    assert not tracker._thread.is_alive()
    return messages


def test_calls_reach_backend_in_order():
    backend = Backend()
    assert run_with(backend, steps=1) == ["hello"]
    assert backend.calls == [("start",), ("log", {"a/00": 1.0, "a/01": 2.0}, 0), ("finish", False), ("abandon",)]


@pytest.mark.parametrize("call", ["start", "log", "finish"])
@pytest.mark.parametrize("error", [OSError("disk full"), SystemExit(3), KeyboardInterrupt()])
def test_error_in_backend_turns_tracker_off_with_one_message(call, error):
    backend = Backend(**{call: error}, abandon=error)
    assert [message for message in run_with(backend) if message != "hello"] == [
        f"fake is off for this run ({str(error) or 'KeyboardInterrupt'}); metrics.jsonl has every line."
    ]
    assert backend.calls[-1] == ("abandon",)


@pytest.mark.parametrize("call", ["start", "log", "finish", "abandon"])
def test_backend_that_hangs_is_killed(call, monkeypatch):
    monkeypatch.setattr(guard, "CLOSE_S", 0.05)
    backend = Backend(**{call: "hang"})
    assert sum("is off for this run (no answer" in message for message in run_with(backend)) == 1
    assert ("kill",) in backend.calls


def test_full_queue_turns_tracker_off(monkeypatch):
    monkeypatch.setattr(guard, "QUEUE_LENGTH", 10)
    monkeypatch.setattr(guard, "CLOSE_S", 0.05)
    messages = run_with(Backend(start="hang"), steps=100)
    assert messages[0] == "fake is off for this run (too slow); metrics.jsonl has every line."
    assert sum("is off" in message for message in messages) == 1


def test_expand_truncates_long_lists_and_drops_missing_values():
    flat = expand({"load": [0.5] * 100, "none": None, "some": [1.0, None], "x": 1})
    assert len(flat) == guard.LONGEST_LIST + 2
    assert flat["load/63"] == 0.5
