"""`toolkit ray`: what it refuses, and a run that loses a machine and gets another."""

from __future__ import annotations

import random
from argparse import ArgumentTypeError
from pathlib import Path

import pytest

from tests.support.forked_python import run_forked
from tests.support.helpers import ROOT
from toolkit.commands import main
from toolkit.commands.ray.command import absolute, parse_workers
from toolkit.commands.ray.ray_train import Journal

MNIST = str(ROOT / "recipes" / "mnist_moe.py")


def test_parse_workers_reads_number_and_range():
    assert parse_workers("4") == (4, 4)
    assert parse_workers("2:8") == (2, 8)
    for text in ("0", "8:2"):
        with pytest.raises(ArgumentTypeError, match=f"{text}: take a number, or the fewest and the most"):
            parse_workers(text)


def test_absolute_keeps_uri_and_completes_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    assert absolute("s3://bucket/run/") == "s3://bucket/run"
    assert absolute("copies/run") == f"{tmp_path}/copies/run"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((MNIST, "--resize-every", "0"), "argument --resize-every: 0: take a number above 0"),
        ((MNIST, "debug", "--num-processes", "2"), "--num-processes 2: use --workers here."),
        ((MNIST, "debug", "--workres", "2"), "unknown flag --workres"),
        (("recipes/nothing.py",), "recipes/nothing.py: no such script"),
    ],
)
def test_bad_input_exits_with_one_line_before_connecting(words, said, capsys):
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'moe-toolkit[ray]'")
    assert main(["ray", *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_ray_missing_exits_with_install_command():
    code = "import sys; sys.modules['ray'] = None; from toolkit.commands import main; import toolkit.train.trainer; "
    code += f"sys.exit(main(['ray', {MNIST!r}, 'debug']))"
    done = run_forked("-c", code)
    assert done.returncode == 2
    assert done.stderr == "error: toolkit ray needs Ray Train, which is missing: pip install 'moe-toolkit[ray]'.\n"


def test_journal_reasons_name_numbers_of_processes():
    journal = Journal()
    assert journal.begin(3) == ([], "")
    journal.note("rank 1 was lost.")
    assert journal.begin(2)[0] == ["rank 1 was lost. 3 processes before, 2 from here on."]
    assert journal.begin(3)[0][1:] == ["machines were added or taken away. 2 processes before, 3 from here on."]
    journal.refuse("bad input.")
    assert journal.begin(3)[1] == "bad input."


@pytest.mark.ray
def test_run_with_lost_and_added_machine_equals_undisturbed_run(tmp_path: Path):
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'moe-toolkit[ray]'")
    from benchmarks.faults import ray_faults

    flags = ["--dataset", "digits", "--log-every", "1", "--checkpoint.every-steps", "4", "--tracker", "none"]
    script = tmp_path / "recipe.py"
    script.write_text(ray_faults.RECIPE.format(root=str(ROOT), pause=0))
    ray_faults.undisturbed(script, tmp_path / "undisturbed", flags)
    script.write_text(ray_faults.RECIPE.format(root=str(ROOT), pause=0.3))
    with ray_faults.machines(3) as cluster:
        run = ray_faults.DisturbedRun(script, tmp_path / "run", flags, "2:3", cluster.address)
        run.trains_again(-1, 3, 5)
        ray_faults.disturb(run, cluster, "remove", random.Random(0))
        ray_faults.disturb(run, cluster, "add", random.Random(0))
        run.wait_for(lambda: run.process.poll() is not None, "the end")
        assert run.process.returncode == 0, run.log.read_text()
    found = ray_faults.differences(tmp_path / "undisturbed", tmp_path / "run")
    assert found["lines missing"] == 0
    assert found["largest difference of losses"] < 1e-9
    assert found["accuracy"] == found["accuracy undisturbed"]
    restarts = (tmp_path / "run" / "summary.txt").read_text()
    assert "2 processes before, 3 from here on." in restarts
