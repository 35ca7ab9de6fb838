from __future__ import annotations

import threading

import pytest

from toolkit.run.tracking import guard
from toolkit.run.tracking.guard import GuardedTracker, expand


class Backend:
    """Does as it is told: `faults` maps the name of a call to what happens in it."""

    name = "fake"

    def __init__(self, **faults):
        self.faults, self.calls, self.released = faults, [], threading.Event()

    def _do(self, call, *details):
        self.calls.append((call, *details))
        fault = self.faults.get(call)
        if fault == "hang":
            self.released.wait()
        elif fault is not None:
            raise fault

    def start(self):
        self._do("start")
        return "hello"

    def log(self, values, step):
        self._do("log", values, step)

    def log_images(self, images):
        self._do("log_images", images)

    def log_results(self, results, tables):
        self._do("log_results", results, tables)

    def finish(self, *, failed):
        self._do("finish", failed)

    def abandon(self):
        self._do("abandon")

    def kill(self):
        self._do("kill")
        self.released.set()


def run_with(backend, lines=3):
    said = []
    tracker = GuardedTracker(backend, said.append)
    for step in range(lines):
        tracker.log({"a": [1.0, 2.0]}, step)
    tracker.close()
    assert not tracker._thread.is_alive()
    return said


def test_calls_reach_the_backend_in_order_and_its_notice_the_user():
    backend = Backend()
    assert run_with(backend, lines=1) == ["hello"]
    assert backend.calls == [("start",), ("log", {"a/00": 1.0, "a/01": 2.0}, 0), ("finish", False), ("abandon",)]


@pytest.mark.parametrize("call", ["start", "log", "finish"])
@pytest.mark.parametrize("error", [OSError("disk full"), SystemExit(3), KeyboardInterrupt()])
def test_any_fault_turns_the_tracker_off_with_one_line(call, error):
    backend = Backend(**{call: error}, abandon=error)
    said = run_with(backend)
    assert [line for line in said if line != "hello"] == [
        f"fake is off for this run ({str(error) or 'KeyboardInterrupt'}); metrics.jsonl has every line."
    ]
    assert backend.calls[-1] == ("abandon",)


@pytest.mark.parametrize("call", ["start", "log", "finish", "abandon"])
def test_a_call_that_hangs_is_given_up_and_made_to_return(call, monkeypatch):
    monkeypatch.setattr(guard, "CLOSE_S", 0.05)
    backend = Backend(**{call: "hang"})
    said = run_with(backend)
    assert sum("is off for this run (no answer" in line for line in said) == 1
    assert ("kill",) in backend.calls


def test_a_backend_that_cannot_keep_up_is_turned_off_and_training_never_waits(monkeypatch):
    monkeypatch.setattr(guard, "QUEUE_LENGTH", 10)
    monkeypatch.setattr(guard, "CLOSE_S", 0.05)
    backend = Backend(start="hang")
    said = run_with(backend, lines=100)
    assert said[0] == "fake is off for this run (too slow); metrics.jsonl has every line."
    assert sum("is off" in line for line in said) == 1


def test_long_lists_are_cut_and_missing_values_left_out():
    flat = expand({"load": [0.5] * 100, "none": None, "some": [1.0, None], "x": 1})
    assert len(flat) == guard.LONGEST_LIST + 2
    assert flat["load/63"] == 0.5
