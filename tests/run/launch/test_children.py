"""Children get this process's signals and never outlive it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.support.helpers import ROOT
from toolkit.run.launch.children import Children

SLEEP = [sys.executable, "-c", "import time; print('ready', flush=True); time.sleep(60)"]
NOTES = """
import pathlib, signal, sys, time
def note(number, frame):
    pathlib.Path(sys.argv[1]).write_text(signal.Signals(number).name)
    sys.exit(0)
signal.signal(signal.SIGTERM, note)
signal.signal(signal.SIGINT, note)
print("ready", flush=True)
time.sleep(60)
"""


def start_ready(children: Children, code: str, *words: str) -> None:
    """Start `code` and wait until it prints a line."""
    child = children.start([sys.executable, "-c", code, *words], stdout=subprocess.PIPE)
    assert child.stdout is not None
    with child.stdout as output:
        output.readline()


@pytest.mark.parametrize(("number", "arrives"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "SIGTERM")])
def test_a_signal_reaches_every_child_and_ctrl_c_as_what_was_chosen(number: int, arrives: str, tmp_path: Path):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    notes = [tmp_path / "0", tmp_path / "1"]
    with Children(interrupt=signal.SIGTERM) as children:
        for note in notes:
            start_ready(children, NOTES, str(note))
        signal.raise_signal(number)
        assert children.wait(timeout_s=30) == {}
    assert [note.read_text() for note in notes] == [arrives] * 2
    assert children.received == [number]
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_what_was_received_is_raised_again_where_that_is_asked_for():
    children = Children(raise_received=True)

    def interrupted() -> None:
        with children:
            start_ready(children, NOTES, os.devnull)
            signal.raise_signal(signal.SIGINT)
            children.wait(timeout_s=30)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [child.returncode for child in children.processes] == [0]


def test_a_second_ctrl_c_kills():
    with Children() as children:
        deaf = "import signal, time; signal.signal(2, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)"
        start_ready(children, deaf)
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert children.wait(timeout_s=30) == {0: -signal.SIGKILL}


def test_the_first_failures_are_returned_and_the_others_are_killed_after_their_grace():
    with Children() as children:
        children.start(SLEEP)
        children.start([sys.executable, "-c", "raise SystemExit(3)"])
        assert children.wait(grace_s=lambda failed: float(failed[1] != 3)) == {1: 3}
    assert children.processes[0].returncode == -signal.SIGKILL


def test_a_deadline_ends_the_wait():
    with Children() as children:
        children.start(SLEEP)
        assert children.wait(timeout_s=0.1) == {}
    assert children.processes[0].returncode == -signal.SIGKILL


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is of Linux")
def test_children_die_with_a_parent_that_is_killed():
    code = f"""
import sys
from toolkit.run.launch.children import Children
with Children() as children:
    print(children.start({SLEEP!r}, stdout=2).pid, flush=True)
    children.wait()
"""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, text=True, **pipes) as parent:
        assert parent.stdout is not None
        assert parent.stderr is not None
        child = psutil.Process(int(parent.stdout.readline()))
        assert parent.stderr.readline() == "ready\n"
        os.kill(parent.pid, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
