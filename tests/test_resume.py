"""Stop a run anywhere, give the same command again: nothing of it can be told from a run that was never stopped."""

from pathlib import Path

import pytest

import toolkit as tk
from tests.support.forked_python import run_forked
from tests.support.helpers import run_distributed
from tests.support.small_run import SAMPLES, STEPS, STEPS_PER_EPOCH, Outcome, Stop, small_config, small_trainer, train
from toolkit.errors import Preempted
from toolkit.run.config.callback_options import CheckpointOptions


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Outcome:
    outcome = train(small_config(tmp_path_factory.mktemp("uninterrupted") / "run"))
    assert sorted(i for step in range(STEPS_PER_EPOCH) for i in outcome.samples[step]) == list(range(SAMPLES))
    assert [line["step"] for line in outcome.metrics] == [3, 6, 9, 10, 12, 15, 18, 20]
    return outcome


def stopped_and_continued(
    folder: Path, step: int, how: str, error: type[BaseException], begins: int = 0, **settings
) -> Outcome:
    """Stop at `step`, continue; the samples are those of both processes, in the order in which they came."""
    first, second = Stop(step, how), Stop()
    with pytest.raises(error):
        train(small_config(folder, **settings), first)
    outcome = train(small_config(folder, **settings), second)
    outcome.samples = dict(first.samples) | dict(second.samples)
    if error is Preempted:
        assert [at for at, _ in first.samples + second.samples] == list(range(begins, STEPS)), "repeated or skipped"
    return outcome


@pytest.mark.parametrize("step", [9, 10])
def test_a_run_preempted_at_any_step_goes_on_as_if_it_had_not_been(step, tmp_path, uninterrupted):
    how = "SIGTERM" if step % 2 else "SIGUSR1"
    stopped_and_continued(tmp_path / "run", step, how, Preempted).assert_equals(uninterrupted)


@pytest.mark.parametrize("step", [1, 4, 5, 20])
def test_a_run_that_fails_at_any_step_goes_on_from_the_last_checkpoint(step, tmp_path, uninterrupted):
    every = {"checkpoint": CheckpointOptions(every_steps=4)}
    stopped_and_continued(tmp_path / "run", step, "exception", RuntimeError, **every).assert_equals(uninterrupted)


def test_a_run_stopped_at_every_step_in_turn_arrives_at_the_same_end(tmp_path, uninterrupted):
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


def test_a_run_goes_back_to_an_older_checkpoint_once_and_later_ones_are_kept(tmp_path, uninterrupted):
    folder = tmp_path / "run"
    often = {"checkpoint": CheckpointOptions(every_steps=4, keep=9)}
    with pytest.raises(Preempted):
        train(small_config(folder, **often), Stop(14, "SIGTERM"))
    with pytest.raises(tk.UserError, match=r"resume_from=5: there is no such checkpoint .* take one of 4, 8, 12, 14"):
        train(small_config(folder, **often, resume_from=5))
    back, again = Stop(10, "SIGTERM"), Stop()
    with pytest.raises(Preempted):
        train(small_config(folder, **often, resume_from=8), back)
    outcome = train(small_config(folder, **often, resume_from=8), again)
    assert [step for step, _ in (*back.samples, *again.samples)] == list(range(8, STEPS))
    kept = [path.name for path in (folder / "checkpoints" / "after-step-00000008").iterdir()]
    assert sorted(kept) == ["step-00000012", "step-00000014"]
    outcome.samples = uninterrupted.samples
    outcome.assert_equals(uninterrupted)


def test_a_shorter_run_is_extended_to_what_the_longer_one_is(tmp_path, uninterrupted, capsys):
    folder = tmp_path / "run"
    with small_trainer(small_config(folder, max_steps=10)) as trainer:
        trainer.run.finish(trainer.fit())
    with pytest.raises(tk.UserError, match=r"has a finished run\. .* extend=True"):
        train(small_config(folder, max_steps=20))
    with pytest.raises(tk.UserError, match="extend=True: the run has 10 steps already"):
        train(small_config(folder, max_steps=10, extend=True))
    capsys.readouterr()
    settings = {"max_steps": 20, "extend": True, "begins": 10}
    outcome = stopped_and_continued(folder, 15, "SIGTERM", Preempted, **settings)
    outcome.samples = uninterrupted.samples
    outcome.assert_equals(uninterrupted)
    # It has no results yet: the same command, which may have been stopped just before them, gets there.
    with small_trainer(small_config(folder, max_steps=20, extend=True)) as trainer:
        assert trainer.run.finish(trainer.fit()).items() >= uninterrupted.results.items()
    with pytest.raises(tk.UserError, match="extend=True: the run has 20 steps already"):
        train(small_config(folder, max_steps=20, extend=True))
    assert "extended to step 20: the schedule now has this length; the learning rate goes from" in (
        capsys.readouterr().out
    )
    with pytest.raises(tk.UserError, match="batch_size=5"):
        train(small_config(folder, max_steps=30, extend=True, batch_size=5))
    with pytest.raises(tk.UserError, match="extend=True: no run in"):
        train(small_config(tmp_path / "none", extend=True))


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


@pytest.mark.parametrize(
    ("refused", "damaged"),
    [
        ({"max_steps": 10}, None),
        ({"max_steps": 20, "resume_from": 5}, None),
        ({"max_steps": 10}, "config.json"),
        ({"max_steps": 20}, "checkpoints/*/*.safetensors"),
    ],
)
def test_a_refused_extension_leaves_a_finished_run_as_it_was(tmp_path, monkeypatch, refused, damaged):
    folder = tmp_path / "run"
    often = {"checkpoint": CheckpointOptions(every_steps=5, keep=9)}
    with small_trainer(small_config(folder, max_steps=10, **often)) as trainer:
        trainer.run.finish(trainer.fit())
    for path in folder.glob(damaged) if damaged else ():
        path.write_text("damaged")
    before = files(folder)

    def does_not_fit(*_, **__):
        raise tk.UserError("the model is another one.")

    if "resume_from" in refused:
        monkeypatch.setattr("toolkit.checkpoint.checkpoint.load_checkpoint", does_not_fit)
    with pytest.raises(tk.UserError, match=r"has 10 steps already|the model is another one|extend=True: no checkp"):
        train(small_config(folder, extend=True, **often, **refused))
    assert files(folder) == before


def test_gradient_accumulation_continues_exactly(tmp_path):
    settings = {"gradient_accumulation_steps": 2}
    whole = train(small_config(tmp_path / "whole", **settings))
    stopped_and_continued(tmp_path / "run", 7, "SIGTERM", Preempted, **settings).assert_equals(whole)


@pytest.mark.parametrize("step", [15])
def test_a_killed_run_goes_on_from_the_last_checkpoint(step, tmp_path, uninterrupted):
    folder = tmp_path / "run"
    code = (
        "from pathlib import Path; from toolkit.run.config.run import CheckpointOptions;"
        "from tests.support.small_run import *;"
        f"config = small_config(Path({str(folder)!r}), checkpoint=CheckpointOptions(every_steps=4));"
        f"train(config, Stop({step}, 'SIGKILL'))"
    )
    assert run_forked("-c", code).returncode == -9
    outcome = train(small_config(folder, checkpoint=CheckpointOptions(every_steps=4)))
    outcome.samples = uninterrupted.samples | outcome.samples
    outcome.assert_equals(uninterrupted)


def train_on_ranks(folder: Path, ep_size: int, accumulation: int) -> None:
    """Stop rank 1 alone by a signal, at various steps; compare with a run left alone."""
    settings = {"gradient_accumulation_steps": accumulation, "batch_size": 24}
    whole = train(small_config(folder / "whole", **settings), ep_size=ep_size)
    for step in (16,) if ep_size == 2 else (3, 16):
        config = small_config(folder / f"run-{step}", **settings)
        first, second = Stop(step, "SIGTERM", rank=1), Stop()
        # Ranks agree one step later.
        with pytest.raises(Preempted, match=f"stopped by SIGTERM at step {step + 1};"):
            train(config, first, ep_size=ep_size)
        outcome = train(config, second, ep_size=ep_size)
        assert [at for at, _ in first.samples + second.samples] == list(range(STEPS))
        outcome.samples |= dict(first.samples)
        outcome.assert_equals(whole)


@pytest.mark.parametrize(
    ("world_size", "ep_size", "accumulation"),
    [(2, 1, 1), (2, 2, 2), (4, 2, 1)],
    ids=["copied experts", "accumulation", "two groups of two"],
)
def test_ranks_stop_together_and_continue_exactly(world_size, ep_size, accumulation, tmp_path):
    run_distributed(train_on_ranks, world_size, tmp_path, ep_size, accumulation)
