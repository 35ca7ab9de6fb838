"""The script of faults: what it calls refused, stopped, exact and silent, and a sample of its faults."""

import os
import re
from collections import Counter

import pytest

from benchmarks.faults import inject
from benchmarks.faults.lab import Attempt, Fault, Lab, Seen, lost, newest_intact, verdict

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
        (Seen(-9, "", "fault: SIGKILL in the phase step after step 10 at 3.5 s\n"), "killed"),
        (
            Seen(-9, "", "fault: SIGKILL in the phase step after step 11 at 3.5 s\n"),
            "killed after step 11, the newest checkpoint is of 0",
        ),
        (Seen(1, "", ""), "ended with 1"),
        (Seen(0, "", ""), "finished"),
        (Seen(None, "", ""), "hung"),
    ],
)
def test_an_attempt_is_judged_by_what_a_user_sees(seen, expected, tmp_path):
    assert verdict(seen, tmp_path, None) == expected


def test_work_is_lost_where_a_run_begins_before_the_newest_checkpoint_that_is_intact(tmp_path):
    (tmp_path / "checkpoints" / "step-00000020").mkdir(parents=True)  # without a manifest
    assert newest_intact(tmp_path) == 0
    continued = Seen(0, "run folder\ncontinuing at step 1,010 (step-00001010 verified)\n", "")
    assert lost(continued, 1010) is None
    assert lost(continued, 1020) == "began at step 1010 with a checkpoint of step 1020"
    assert lost(Seen(0, "run folder\n", ""), 10) == "began at step 0 with a checkpoint of step 10"


@pytest.mark.parametrize(("out", "found", "code"), [("notice: x\n", "finished", 0), ("", "finished, then silent", 1)])
def test_a_run_that_does_not_say_what_it_should_is_silent(out, found, code, monkeypatch, capsys):
    fault = Fault("flag", "a flag", [Attempt(command="x.py")], "finished", "notice")
    monkeypatch.setattr(inject, "faults", lambda _: [fault, fault])
    monkeypatch.setattr(inject, "Server", NoServer)
    monkeypatch.setattr(Lab, "undisturbed", lambda *_, **__: None)
    monkeypatch.setattr(Lab, "run", lambda *_: Seen(0, out, ""))
    assert inject.main(["--sample", "1"]) == code
    assert f"| flag | a flag | {out.strip()} | 0 | {found}" in capsys.readouterr().out


class NoServer:
    def left_behind(self, _):
        return []

    def close(self): ...


def test_a_fault_of_which_a_process_is_left_behind_is_not_as_expected(monkeypatch, tmp_path):
    monkeypatch.setattr(Lab, "undisturbed", lambda *_, **__: None)
    monkeypatch.setattr(Lab, "run", lambda *_: Seen(0, "", ""))
    monkeypatch.setattr(NoServer, "left_behind", lambda *_: ["python x.py"])
    fault = Fault("flag", "a flag", [Attempt(command="x.py")], "finished")
    _, found = Lab(tmp_path).examine(NoServer(), fault, tmp_path / "run")
    assert found == "finished, then left 1 process(es) behind (python x.py)"


@pytest.mark.parametrize(("step", "found"), [(28, "went on"), (29, "finished")])
def test_a_run_that_ignores_what_should_stop_it_is_not_as_expected(step, found, monkeypatch, tmp_path):
    came = f"fault: SIGTERM in the phase step after step {step} at 3.5 s\n"
    monkeypatch.setattr(Lab, "undisturbed", lambda *_, **__: None)
    monkeypatch.setattr(Lab, "run", lambda *_: Seen(0, "", came))
    fault = Fault("run stopped by a signal", "SIGTERM", [Attempt(command="x.py")], "stopped", stops=True)
    assert Lab(tmp_path).examine(NoServer(), fault, tmp_path / "run")[1] == found


def test_what_is_done_is_not_injected_again(monkeypatch, tmp_path, capsys):
    listed = [Fault("kind", f"fault {index}", [Attempt(command="x.py")], "finished") for index in range(4)]
    another = Fault("other kind", "another", [Attempt(command="x.py")], "finished")
    monkeypatch.setattr(inject, "faults", lambda _: [*listed, another])
    monkeypatch.setattr(inject, "Server", NoServer)
    monkeypatch.setattr(Lab, "undisturbed", lambda *_, **__: None)
    monkeypatch.setattr(Lab, "run", lambda *_: Seen(0, "", ""))
    words = ["--done", str(tmp_path / "done"), "--only"]
    assert inject.main([*words, "fault 1"]) == 0
    assert inject.main([*words, "fault"]) == 0
    shown = re.findall(r"\| kind \| (fault \d)", capsys.readouterr().out)
    assert sorted(shown) == ["fault 0", "fault 1", "fault 2", "fault 3"]


def test_there_are_a_thousand_and_a_sample_has_some_of_each_kind():
    listed = inject.faults(seed=0)
    assert sum(fault.count for fault in listed) >= 1000
    assert len({(fault.kind, fault.name) for fault in listed}) == len(listed)
    chosen = Counter(fault.kind for fault in inject.sample(listed, 60))
    assert sum(chosen.values()) == 60
    assert set(chosen) == {fault.kind for fault in listed}


def test_no_fault_is_met_by_a_command_that_ends_well_and_says_nothing():
    commands = [fault for fault in inject.faults(seed=0) if any(attempt.command for attempt in fault.attempts)]
    assert len([fault for fault in commands if fault.kind == "file of a finished run damaged"]) == 70
    assert [
        fault.name for fault in commands if not fault.says and re.search("finished(?! already)", fault.expected)
    ] == []


def test_a_sample_of_faults_loses_nothing_and_changes_no_bit(capsys):
    jobs = max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
    assert inject.main(["--sample", "2", "--jobs", str(jobs)]) == 0, capsys.readouterr()
