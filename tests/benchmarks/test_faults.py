"""The script of faults: what it calls refused, stopped, exact and silent, and one fault from end to end."""

import subprocess

import pytest

from benchmarks import faults
from benchmarks.faults import Attempt, Fault, Seen, verdict
from tests.forked_python import ForkedPython

LINE = "error: --lr 0: take a rate above zero.\n"


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (Seen(2, "", LINE), "refused"),
        (Seen(2, "", LINE * 2), "refused in 2 lines"),
        (Seen(75, "", "stopped by SIGTERM.\n"), "stopped"),
        (Seen(1, "", "error: rank 1 of 2 was stopped.\n"), "stopped"),
        (Seen(1, "", "Traceback (most recent call last):\n"), "traceback"),
        (Seen(0, "Traceback of a thread", "Traceback (most recent call last):\n"), "traceback"),
        (Seen(-9, "", ""), "killed"),
        (Seen(1, "", ""), "ended with 1"),
        (Seen(0, "", ""), "finished"),
    ],
)
def test_an_attempt_is_judged_by_what_a_user_sees(seen, expected, tmp_path):
    assert verdict(seen, tmp_path, None) == expected


@pytest.mark.parametrize(("out", "verdict", "code"), [("notice: x\n", "finished", 0), ("", "finished, then silent", 1)])
def test_a_run_that_does_not_say_what_it_should_is_silent(out, verdict, code, monkeypatch, capsys):
    fault = Fault(3, "flag", [Attempt(command="x.py")], "finished", "notice")
    monkeypatch.setattr(faults, "faults", lambda: [fault])
    monkeypatch.setattr(faults.Lab, "run", lambda *_: Seen(0, out, ""))
    assert faults.main([]) == code
    assert f"| 3 | flag | {out.strip()} | 0 | {verdict}" in capsys.readouterr().out


def test_a_sample_lies_evenly_over_the_list(monkeypatch, capsys):
    listed = [Fault(1, f"fault {index}", [Attempt(command="x.py")], "finished", "") for index in range(10)]
    monkeypatch.setattr(faults, "faults", lambda: listed)
    monkeypatch.setattr(faults.Lab, "run", lambda *_: Seen(0, "", ""))
    assert faults.main(["--sample", "3"]) == 0
    shown = capsys.readouterr().out
    assert [index for index in range(10) if f"| fault {index} |" in shown] == [0, 3, 6]


def test_a_run_on_other_data_is_refused_and_the_right_data_continue_it(capsys, monkeypatch):
    monkeypatch.setattr(
        subprocess, "Popen", lambda command, *, cwd, env, **_: ForkedPython(*command[1:], cwd=cwd, env=env)
    )
    assert faults.main(["--only", "other data"]) == 0, capsys.readouterr().out
    assert "refused, then continued exactly" in capsys.readouterr().out


def test_every_item_that_a_program_can_inject_has_a_fault():
    items = {fault.item for fault in faults.faults()}
    assert items == set(range(1, 19)) - {5}, "a plan that the guard refuses is no fault, but what it is for"
