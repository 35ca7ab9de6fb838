"""--auto-batch-size: trial runs of the same command, then the run with the largest batch that fits."""

import json

import pytest

import toolkit as tk
from benchmarks.support.processes import free_port
from tests.run.launch.launched import environment
from tests.support.forked_python import run_forked
from toolkit.run.launch import largest_batch

# A trial, which logs every step, would run for a minute after its second step.
RECIPE = '''
"""A recipe whose batches fit up to a size."""
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


def run(folder, *flags):
    """Return stdout, and the batch size and learning rate of the run."""
    (folder / "recipe.py").write_text(RECIPE)
    done = run_forked("recipe.py", "--auto-batch-size", "--run-dir", "run", *flags, cwd=folder, env=environment())
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads((folder / "run" / "config.json").read_text())


def test_auto_batch_size_doubles_until_out_of_memory_and_resumed_run_keeps_batch(tmp_path):
    out, config = run(tmp_path)
    assert out == (
        "batch of 32 samples: 2 times --batch-size; the learning rate is 0.01414, times the square root of that. "
        "With 64 a step ran out of memory.\n"
    )
    assert config == {"batch_size": 32, "lr": pytest.approx(0.01 * 2**0.5, rel=1e-12)}
    assert run(tmp_path, "--samples", "1") == ("", config)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--samples 40", "With 32 an epoch has less than 2 steps."),
        ("--most 16", "With 32 it ended: no 32 samples."),
        ("--fits 8 --scale-lr 16", "is 0.01, scaled by --scale-lr. With 16 a step ran out of memory."),
    ],
)
def test_auto_batch_size_ignores_batch_without_two_steps(tmp_path, flags, message):
    out, config = run(tmp_path, *flags.split())
    assert message in out
    assert config == {"batch_size": 16, "lr": 0.01}


def test_largest_stops_before_host_memory_limit(monkeypatch):
    monkeypatch.setattr(largest_batch, "_try", lambda size: size * 2**26)
    monkeypatch.setattr(largest_batch, "memory_limit_bytes", lambda: 3 * 2**30)
    message = "With 64 it might need more than the 3.0 GiB of this machine."
    assert largest_batch._largest(tk.RunConfig(batch_size=8)) == (32, message)


def test_auto_batch_size_in_rank_of_launcher_raises(tmp_path):
    recipe = RECIPE.replace("main(config):", "main(config):\n    tk.start_run('mine', config)")
    (tmp_path / "recipe.py").write_text(recipe)
    launched = environment(WORLD_SIZE="1", RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    done = run_forked("recipe.py", "--auto-batch-size", "--cpu", "--tracker", "none", cwd=tmp_path, env=launched)
    assert done.returncode == 2
    assert done.stderr.startswith("error: auto_batch_size=True: only the command of a recipe")
