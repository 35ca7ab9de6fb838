"""Whole runs with dynamic experts: the same events on any number of ranks, and after a resumed stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.dynamic.dynamic_run import EVENTFUL, dynamic_config, dynamic_trainer, history_of
from tests.support.equality import relative_difference
from tests.support.helpers import run_distributed
from toolkit.data.table import Batch
from toolkit.dynamic.callback import COUNTED, Lifecycle
from toolkit.experts.parallel.optimizer_rows import unwrapped
from toolkit.experts.state.state_dict import whole_state_dict
from toolkit.run.tracking.jsonl import read_metrics
from toolkit.train.callbacks.base import Callback
from toolkit.train.trainer import Trainer

Outcome = tuple[list[tuple[int, str, tuple[int, ...]]], list[float], dict[str, Any]]


def train(folder: Path, ep_size: int, settings: dict[str, Any]) -> Outcome:
    """History, losses line by line, and results."""
    config = dynamic_config(folder, **settings)
    with dynamic_trainer(config, ep_size=ep_size) as (trainer, lifecycle):
        results = trainer.fit()
        assert_in_bounds(lifecycle, config.lifecycle.min_experts)
    if dist.is_initialized():
        dist.barrier()
    return history_of(lifecycle), [line["train/loss"] for line in read_metrics(folder / "metrics.jsonl")], results


def assert_in_bounds(lifecycle: Lifecycle, fewest: int) -> None:
    for name, layer in lifecycle.layers.items():
        roster = lifecycle.rosters[name]
        assert fewest <= len(roster) <= roster.logical_experts
        used = {record.logical_id for record in roster.active}
        assert {logical_id for logical_id in range(roster.logical_experts) if layer.router.active_E[logical_id]} == used
        for logical_id in range(roster.logical_experts):
            place = layer.placement.owner(logical_id)
            if place.rank == layer.expert_stack.groups.ep_rank:
                assert bool(layer.experts.up[place.slot].any()) == (logical_id in used)
        per_rank = [len(used & set(layer.placement.slots[rank])) for rank in range(layer.placement.ranks)]
        assert max(per_rank) - min(per_rank) <= 1 or lifecycle.history[-1].kind != "sleep"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """On one process, without a stop."""
    return run_distributed(train, 1, tmp_path_factory.mktemp("alone") / "run", 1, {})[0]


@pytest.fixture(scope="module")
def on_two(tmp_path_factory: pytest.TempPathFactory) -> list[Outcome]:
    """Of each of two processes with half of the experts, without a stop."""
    return run_distributed(train, 2, tmp_path_factory.mktemp("on_two") / "run", 2, {})


def test_the_run_has_events_of_all_kinds(alone: Outcome) -> None:
    history, _, results = alone
    kinds = [kind for _, kind, _ in history]
    assert kinds.count("sleep") >= 5
    assert {"grow", "merge", "prune", "undone"} <= set(kinds)
    created = [uids[0] for _, kind, uids in history if kind == "grow"]
    assert created == sorted(set(created)) == list(range(3, 3 + len(created)))
    assert all(step >= 50 for step, kind, _ in history if kind == "grow"), "before the data shifted"
    assert results["lifecycle_sleep"] == kinds.count("sleep")


def assert_same_run(found: list[Outcome], expected: Outcome) -> None:
    for history, losses, results in found:
        assert history == expected[0]
        assert relative_difference(torch.tensor(losses), torch.tensor(expected[1])) < 1e-5
        assert results["test_loss"] == pytest.approx(expected[2]["test_loss"], rel=1e-5)


def test_two_ranks_have_the_same_events_and_losses_as_one(alone: Outcome, on_two: list[Outcome]) -> None:
    assert_same_run(on_two, alone)


def weights_after_removals(folder: Path, ep_size: int) -> tuple[dict[str, Tensor], int]:
    """Weights of a run in which experts are removed and others get their ids, with replay before; and the removals."""
    lifecycle = EVENTFUL.replace(undo_above=5.0, replay_steps=5, trial_gain=0.5, grow_every=5, prune_below=0.3)
    with dynamic_trainer(dynamic_config(folder, lifecycle=lifecycle), ep_size=ep_size) as (trainer, watched):
        trainer.fit()
        removals = sum(kind in ("merge", "prune") for _, kind, _ in history_of(watched))
        return whole_state_dict(trainer.raw_model), removals


def test_replay_does_not_depend_on_the_world_size(tmp_path: Path) -> None:
    (expected, removals), *_ = run_distributed(weights_after_removals, 1, tmp_path / "1", 1)
    assert removals > 5
    for world in (2, 4):
        found, _ = run_distributed(weights_after_removals, world, tmp_path / str(world), world)[0]
        for name, value in expected.items():
            assert not value.is_floating_point() or relative_difference(found[name], value) < 1e-10, name


class Rates(Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_step_start(self, trainer: Trainer, micro_batches: list[Batch]) -> None:  # noqa: ARG002
        self.seen.append(trainer.optimizer.param_groups[0]["lr"])


def test_replay_leaves_the_rates_that_a_scheduler_set(tmp_path: Path) -> None:
    rates = Rates()
    with dynamic_trainer(dynamic_config(tmp_path / "run", max_steps=20), callbacks=(rates,)) as (trainer, watched):
        trainer.schedule = None
        trainer.fit()
    assert "sleep" in [kind for _, kind, _ in history_of(watched)]
    assert set(rates.seen) == {0.01}


def test_a_run_resumes_between_any_two_events_on_another_number_of_ranks(tmp_path: Path, alone: Outcome) -> None:
    """Ranks and EP groups change at every stop, and there is a stop after every third event."""
    folder, worlds = tmp_path / "run", [(4, 2), (1, 1), (4, 4)]
    stops = sorted({step for step, _, _ in alone[0]} | {20, 55})[2::3]
    for stop, (world, ep_size) in zip(stops, worlds, strict=True):
        run_distributed(train_until, world, folder, ep_size, stop)
    history, _, results = run_distributed(train, 2, folder, 2, {})[0]
    assert history == alone[0]
    assert results["test_loss"] == pytest.approx(alone[2]["test_loss"], rel=1e-5)


class StopsAt(Callback):
    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.state.step == self.step:
            trainer.request_stop("enough")


def train_until(folder: Path, ep_size: int, stop: int) -> None:
    with dynamic_trainer(dynamic_config(folder), ep_size=ep_size, callbacks=(StopsAt(stop),)) as (trainer, _):
        trainer.fit()
    if dist.is_initialized():
        dist.barrier()


def test_a_stop_changes_no_bit_on_the_same_ranks(tmp_path: Path, on_two: list[Outcome]) -> None:
    run_distributed(train_until, 2, tmp_path / "cut", 2, 71)
    history, _, results = run_distributed(train, 2, tmp_path / "cut", 2, {})[0]
    expected, _, whole = on_two[0]
    assert history == expected
    assert results["test_loss"] == whole["test_loss"]


def test_without_sleep_experts_only_grow(tmp_path: Path) -> None:
    lifecycle = EVENTFUL.replace(sleep_every=None)
    history, _, _ = run_distributed(train, 1, tmp_path / "run", 1, {"lifecycle": lifecycle})[0]
    assert {kind for _, kind, _ in history} == {"grow"}


def test_an_undone_change_restores_everything(tmp_path: Path) -> None:
    """A harmful replay is undone: weights, moments, router and the sums of the line of metrics. Nothing else happens,
    because it is switched off."""
    lifecycle = EVENTFUL.replace(check_every=None, merge_distance=None, prune_below=0)
    wrecking = lifecycle.replace(replay_lr=10.0, undo_above=0.0)
    history, losses, results = run_distributed(train, 1, tmp_path / "wrecked", 1, {"lifecycle": wrecking})[0]
    kinds = [kind for _, kind, _ in history]
    assert set(kinds) == {"sleep", "undone"}
    assert kinds.count("undone") >= 5
    _, expected, without = run_distributed(
        train, 1, tmp_path / "without", 1, {"lifecycle": lifecycle.replace(replay_steps=0)}
    )[0]
    assert losses == expected
    assert results["test_loss"] == without["test_loss"]


def test_samples_that_are_replayed_in_sleep_are_augmented_anew(tmp_path: Path) -> None:
    seen: list[torch.Tensor] = []

    def watched(batch: Batch, visits: torch.Tensor) -> Batch:
        seen.append(visits)
        return batch

    with dynamic_trainer(dynamic_config(tmp_path / "run"), augment=watched) as (trainer, lifecycle):
        trainer.fit()
    sleeps = [event for event in lifecycle.history if event.kind == "sleep"]
    in_turn = trainer.max_steps  # those of the steps themselves
    assert len(seen) == in_turn + len(sleeps) * EVENTFUL.replay_steps
    assert len(torch.cat(seen).unique()) == len(torch.cat(seen)), "no visit happens twice"


def train_watched(folder: Path, ep_size: int, all_rows: bool) -> tuple[Outcome, list[int], list[int], list[int]]:
    """An outcome; of each step, the rows of experts that the backward and the optimizer saw, and those up to the last
    active expert."""
    with dynamic_trainer(dynamic_config(folder, max_steps=70), ep_size=ep_size) as (trainer, lifecycle):
        (layer,) = lifecycle.layers.values()
        if all_rows:
            lifecycle.experts.mark_rows_in_use = lambda: None
        backward, seen, needed = [], [], []
        layer.experts.up.register_post_accumulate_grad_hook(lambda up: backward.append(len(up.grad)))

        def watch(*_: Any) -> None:
            assert len(layer.experts.up) == len(layer.experts.down)
            seen.append(len(layer.experts.up))
            active = layer.router.active_E.nonzero().flatten().tolist()
            here = layer.placement.slots[layer.expert_stack.groups.ep_rank]
            needed.append(max(slot + 1 for slot, expert in enumerate(here) if expert in active))

        unwrapped(trainer.optimizer).register_step_post_hook(watch)
        results = trainer.fit()
        assert {len(weight) for weight in (layer.experts.up, layer.experts.down)} == {8 // ep_size}
    losses = [line["train/loss"] for line in read_metrics(folder / "metrics.jsonl")]
    return (history_of(lifecycle), losses, results), backward, seen, needed


@pytest.mark.parametrize("ep_size", [1, 2])
def test_rows_of_inactive_experts_have_no_gradients_and_are_not_stepped(tmp_path: Path, ep_size: int) -> None:
    ours, backward, seen, needed = run_distributed(train_watched, 2, tmp_path / "run", ep_size, False)[0]
    whole, *_ = run_distributed(train_watched, 2, tmp_path / "all", ep_size, True)[0]
    history, losses, results = ours
    all_history, all_losses, all_results = whole
    assert seen[0] == backward[0] == 8 // ep_size
    assert seen[1:] == needed[1:]
    in_ddp = [8] * len(needed)  # whose buckets have one size
    assert backward[1:] == (in_ddp if ep_size == 1 else needed)[1:]
    assert min(needed) < 8 // ep_size
    assert history == all_history
    assert relative_difference(torch.tensor(losses), torch.tensor(all_losses)) < 1e-12
    assert results["test_loss"] == pytest.approx(all_results["test_loss"], rel=1e-12)


def test_a_split_expert_is_kept_for_what_it_gains(tmp_path: Path) -> None:
    """Growth on a schedule; each new expert is tried once, and pruned where the loss without it is hardly higher."""
    scheduled = EVENTFUL.replace(merge_distance=None, prune_below=0, grow_every=7, trial_gain=0.0)
    alone, _, kept = run_distributed(train, 1, tmp_path / "kept", 1, {"lifecycle": scheduled})[0]
    for history, _, _ in run_distributed(train, 2, tmp_path / "two", 2, {"lifecycle": scheduled}):
        assert history == alone
    tried = [uids[0] for _, kind, uids in alone if kind in ("kept", "prune")]
    assert len(tried) == len(set(tried))
    assert kept["lifecycle_kept"] >= 1
    assert min(step for step, kind, _ in alone if kind == "grow") == 7
    greedy = scheduled.replace(trial_gain=1e9)
    _, _, pruned = run_distributed(train, 1, tmp_path / "pruned", 1, {"lifecycle": greedy})[0]
    assert pruned["lifecycle_kept"] == 0
    assert pruned["lifecycle_prune"] >= 2


def test_the_end_of_a_run_leaves_no_idle_expert_and_none_that_was_split_too_late(tmp_path: Path) -> None:
    """No sleep comes before the end, and one expert is hardly used."""
    late = {"min_sleep_every": None, "sleep_every": 500}
    lifecycle = EVENTFUL.replace(**late, grow_every=5, merge_distance=None, min_age=30)
    config = dynamic_config(tmp_path / "run", lifecycle=lifecycle, max_experts=32)
    with dynamic_trainer(config) as (trainer, watched):
        trainer.fit()
    steps_of = {kind: [step for step, found, _ in history_of(watched) if found == kind] for kind in COUNTED}
    assert max(steps_of["grow"]) == trainer.max_steps - 30
    assert set(steps_of["prune"]) == {trainer.max_steps}
