"""TensorBoard event files of a run."""

from tests.support.forked_python import run_forked

PROGRAM = """
import sys
from pathlib import Path
from tests.run.tracking.toy import train
from toolkit.run.config.run import RunConfig
train(RunConfig(run_dir=Path(sys.argv[1]), tracker="tensorboard", cpu=True, log_every=2))

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(str(Path(sys.argv[1]) / "tensorboard"))
events.Reload()
assert [e.step for e in events.Scalars("train/loss")] == list(range(2, 21, 2))
assert abs(events.Scalars("moe/load/block/03")[0].value - 0.1) < 1e-6
assert "plots/loss" in str(events.Tags()["images"]), events.Tags()
"""


def test_tensorboard_has_metrics_and_plots(tmp_path):
    # In a separate process, because TensorBoard's modules warn when they are imported.
    done = run_forked("-c", PROGRAM, str(tmp_path / "run"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tensorboard --logdir" in done.stdout
    assert list((tmp_path / "run" / "tensorboard").rglob("hparams.yml"))
