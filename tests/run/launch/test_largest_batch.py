"""--auto-batch-size: trial runs of the same command, and then the run with the largest batch that fits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import toolkit as tk
from tests.run.launch.test_world import RANK_1_OF_2, environment
from tests.support.forked_python import run_forked
from toolkit.errors import UserError
from toolkit.run.launch import largest_batch

# A trial, which logs each step, would go on for a minute after its second one.
RECIPE = '''
"""A recipe of which batches up to a size fit."""
import json, time
import toolkit as tk

class Config(tk.RunConfig):
    fits: int = 32
    samples: int = 1000
    most: int = 1000

def full() -> Config:
    """The only one."""
    return Config(batch_size=16, lr=0.01)

def main(config):
    if config.batch_size > config.most:
        raise tk.UserError(f"no {config.batch_size} samples.")
    config.run_dir.mkdir(parents=True, exist_ok=True)
    (config.run_dir / "config.json").write_text(json.dumps({"batch_size": config.batch_size, "lr": config.lr}))
    if config.batch_size > config.fits:
        (config.run_dir / "micro_batch_size.json").touch()
    else:
        with (config.run_dir / "metrics.jsonl").open("w") as file:
            for step in (1, 2):
                file.write(json.dumps({"step": step, "train/epoch": step * config.batch_size / config.samples}) + "\\n")
    if config.log_every == 1:
        time.sleep(60)

if __name__ == "__main__":
    tk.run_recipe(main, {"full": full}, __doc__)
'''


def run(folder: Path, *flags: str) -> tuple[str, dict[str, float]]:
    """What is said, and the batch and rate of the run."""
    (folder / "recipe.py").write_text(RECIPE)
    words = ["recipe.py", "--auto-batch-size", "--run-dir", "run", *flags]
    done = run_forked(*words, cwd=folder, env=environment())
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads((folder / "run" / "config.json").read_text())


def test_the_batch_doubles_until_memory_runs_out_and_a_run_that_is_continued_keeps_it(tmp_path: Path):
    said, config = run(tmp_path)
    assert said == (
        "batch of 32 samples: 2 times --batch-size; the learning rate is 0.01414, times the square root of that. "
        "With 64 a step ran out of memory.\n"
    )
    assert config == {"batch_size": 32, "lr": pytest.approx(0.01 * 2**0.5, rel=1e-12)}
    assert run(tmp_path, "--samples", "1") == ("", config)


@pytest.mark.parametrize(
    ("flags", "size", "says"),
    [
        (("--samples", "40"), 16, "With 32 an epoch has less than 2 steps."),
        (("--most", "16"), 16, "With 32 it ended: no 32 samples."),
        (("--fits", "8", "--scale-lr", "16"), 16, "is 0.01, scaled by --scale-lr. With 16 a step ran out of memory."),
    ],
)
def test_a_batch_that_does_not_get_through_two_steps_is_not_taken(tmp_path: Path, flags, size: int, says: str):
    said, config = run(tmp_path, *flags)
    assert says in said
    assert config == {"batch_size": size, "lr": 0.01}


def test_twice_the_memory_is_not_tried_where_there_may_be_less(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(largest_batch, "_try", lambda size: size * 2**26)
    monkeypatch.setattr(largest_batch, "memory_limit_bytes", lambda: 3 * 2**30)
    said = "With 64 it might need more than the 3.0 GiB of this machine."
    assert largest_batch._largest(tk.RunConfig(batch_size=8)) == (32, said)


def test_a_launcher_and_a_call_from_python_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    config = tk.RunConfig(auto_batch_size=True, cpu=True, tracker="none", run_dir=tmp_path)
    with pytest.raises(UserError, match="auto_batch_size=True: only the command of a recipe"):
        tk.start_run("mine", config)
    for name, value in RANK_1_OF_2.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="auto_batch_size=True: a launcher has started the processes"):
        largest_batch.start_with_largest_batch(config)
