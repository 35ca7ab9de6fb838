"""Interrupted runs that resume equal an uninterrupted run in weights, metrics and samples."""

from pathlib import Path

import pytest

import toolkit as tk
from benchmarks.support.processes import run_distributed
from tests.support.forked_python import run_forked
from tests.support.small_run import SAMPLES, STEPS, STEPS_PER_EPOCH, Outcome, Stop, small_config, small_trainer, train
from toolkit.errors import Preempted
from toolkit.run.config.callback_options import CheckpointOptions

EVERY_FOURTH_STEP = {"checkpoint": CheckpointOptions(every_steps=4)}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    outcome = train(small_config(tmp_path_factory.mktemp("uninterrupted") / "run"))
    assert sorted(i for step in range(STEPS_PER_EPOCH) for i in outcome.samples[step]) == list(range(SAMPLES))
    assert [line["step"] for line in outcome.metrics] == [3, 6, 9, 10, 12, 15, 18, 20]
    return outcome


def stop_and_resume(
    folder: Path, stop: Stop, error: type[BaseException], begin: int = 0, ep_size: int = 1, **settings
) -> Outcome:
    """Train until `stop`, resume, and return the outcome with the samples of both."""
    rest = Stop()
    with pytest.raises(error) as raised:
        train(small_config(folder, **settings), stop, ep_size=ep_size)
    outcome = train(small_config(folder, **settings), rest, ep_size=ep_size)
    outcome.samples = dict(stop.samples) | dict(rest.samples)
    if error is Preempted:
        last = stop.step + (stop.rank > 0)  # ranks agree one step later
        assert f"stopped by {stop.how} at step {last};" in str(raised.value)
        assert [at for at, _ in stop.samples + rest.samples] == list(range(begin, STEPS)), "repeated or skipped"
    return outcome


@pytest.mark.parametrize(
    ("step", "how", "error", "settings"),
    [
        (10, "SIGUSR1", Preempted, {}),
        *((step, "exception", RuntimeError, EVERY_FOURTH_STEP) for step in (1, 4, 5, 20)),
    ],
)
def test_resumed_run_equals_an_uninterrupted_run(step, how, error, settings, tmp_path, uninterrupted):
    stop_and_resume(tmp_path / "run", Stop(step, how), error, **settings).assert_equals(uninterrupted)


def test_run_stopped_at_every_step_equals_an_uninterrupted_run(tmp_path, uninterrupted):
    config = small_config(tmp_path / "run")
    samples = {}
    for step in range(1, STEPS):
        stop = Stop(step, "SIGTERM")
        with pytest.raises(Preempted, match=f"stopped by SIGTERM at step {step}; run `.*` to continue"):
            train(config, stop)
        samples |= dict(stop.samples)
    outcome = train(config)
    outcome.samples |= samples
    outcome.assert_equals(uninterrupted)


def test_resume_from_an_older_checkpoint_rewinds_once_and_keeps_later_ones(tmp_path, uninterrupted):
    folder = tmp_path / "run"
    settings = {"checkpoint": CheckpointOptions(every_steps=4, keep=9)}
    with pytest.raises(Preempted):
        train(small_config(folder, **settings), Stop(14, "SIGTERM"))
    with pytest.raises(tk.UserError, match=r"resume_from=5: there is no such checkpoint .* take one of 4, 8, 12, 14"):
        train(small_config(folder, **settings, resume_from=5))
    outcome = stop_and_resume(folder, Stop(10, "SIGTERM"), Preempted, begin=8, **settings, resume_from=8)
    kept = [path.name for path in (folder / "checkpoints" / "after-step-00000008").iterdir()]
    assert sorted(kept) == ["step-00000012", "step-00000014"]
    outcome.samples = uninterrupted.samples
    outcome.assert_equals(uninterrupted)


def finish(config) -> dict:
    with small_trainer(config) as trainer:
        return trainer.run.finish(trainer.fit())


def test_extended_run_equals_a_longer_run(tmp_path, uninterrupted, capsys):
    folder = tmp_path / "run"
    extended = {"max_steps": 20, "extend": True}

    def raises(message: str, folder: Path = folder, **settings) -> None:
        with pytest.raises(tk.UserError, match=message):
            train(small_config(folder, **settings))

    finish(small_config(folder, max_steps=10))
    raises(r"has a finished run\. .* extend=True", max_steps=20)
    raises("extend=True: the run has 10 steps already", max_steps=10, extend=True)
    capsys.readouterr()
    outcome = stop_and_resume(folder, Stop(15, "SIGTERM"), Preempted, begin=10, **extended)
    outcome.samples = uninterrupted.samples
    outcome.assert_equals(uninterrupted)
    # A run that was stopped right before its results gets them from the same command.
    assert finish(small_config(folder, **extended)).items() >= uninterrupted.results.items()
    raises("extend=True: the run has 20 steps already", **extended)
    output = "extended to step 20: the schedule now has this length; the learning rate goes from"
    assert output in capsys.readouterr().out
    raises("batch_size=5", max_steps=30, extend=True, batch_size=5)
    raises("extend=True: no run in", tmp_path / "none", extend=True)


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


@pytest.mark.parametrize(
    ("settings", "damaged", "message"),
    [
        ({"max_steps": 10}, "", "has 10 steps already"),
        ({"max_steps": 20, "resume_from": 5}, "", "the model is another one"),
        ({"max_steps": 10}, "config.json", "has 10 steps already"),
        ({"max_steps": 20}, "checkpoints/*/*.safetensors", "extend=True: no checkp"),
    ],
)
def test_failed_extension_leaves_a_finished_run_unchanged(tmp_path, monkeypatch, settings, damaged, message):
    folder = tmp_path / "run"
    settings = settings | {"checkpoint": CheckpointOptions(every_steps=5, keep=9)}
    finish(small_config(folder, **settings | {"max_steps": 10, "resume_from": None}))
    for path in folder.glob(damaged) if damaged else ():
        path.write_text("damaged")
    before = files(folder)

    def does_not_fit(*_, **__):
        raise tk.UserError("the model is another one.")

    if "resume_from" in settings:
        monkeypatch.setattr("toolkit.checkpoint.checkpoint.load_checkpoint", does_not_fit)
    with pytest.raises(tk.UserError, match=message):
        train(small_config(folder, extend=True, **settings))
    assert files(folder) == before


def test_killed_run_resumes_from_the_last_checkpoint(tmp_path, uninterrupted):
    folder = tmp_path / "run"
    code = (
        "from pathlib import Path; from tests.test_resume import *;"
        f"train(small_config(Path({str(folder)!r}), **EVERY_FOURTH_STEP), Stop(15, 'SIGKILL'))"
    )
    assert run_forked("-c", code).returncode == -9
    outcome = train(small_config(folder, **EVERY_FOURTH_STEP))
    outcome.samples = uninterrupted.samples | outcome.samples
    outcome.assert_equals(uninterrupted)


def stop_rank_1_and_resume(folder: Path, ep_size: int, accumulation: int) -> None:
    settings = {"gradient_accumulation_steps": accumulation, "batch_size": 24}
    uninterrupted = train(small_config(folder / "uninterrupted", **settings), ep_size=ep_size)
    for step in (16,) if ep_size == 2 else (3, 16):
        stop = Stop(step, "SIGTERM", rank=1)
        outcome = stop_and_resume(folder / f"run-{step}", stop, Preempted, ep_size=ep_size, **settings)
        outcome.assert_equals(uninterrupted)


@pytest.mark.parametrize(
    ("world_size", "ep_size", "accumulation"),
    [(2, 1, 1), (2, 2, 2), (4, 2, 1)],
    ids=["replicated experts", "accumulation", "two groups of two"],
)
def test_ranks_stop_together_and_resume_exactly(world_size, ep_size, accumulation, tmp_path):
    run_distributed(stop_rank_1_and_resume, world_size, tmp_path, ep_size, accumulation)
