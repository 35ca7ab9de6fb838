"""`toolkit ray`: what it refuses, and a run that loses a machine and gets another."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support.helpers import ROOT
from toolkit.commands import main

MNIST = str(ROOT / "recipes" / "mnist_moe.py")


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
