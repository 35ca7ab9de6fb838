"""Runs with dynamic experts: the same events for every world size and after a resume."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.support.precision import relative_difference
from benchmarks.support.processes import run_distributed
from tests.dynamic.dynamic_run import EVENTFUL, dynamic_config, dynamic_trainer, history_of
from tests.recipes.runs import losses
from tests.support.trainers import in_hook
from toolkit.data.table import Batch
from toolkit.dynamic.callback import COUNTED, Lifecycle
from toolkit.experts.parallel.optimizer_rows import unwrapped
from toolkit.experts.state.state_dict import whole_state_dict

Outcome = tuple[list[tuple[int, str, tuple[int, ...]]], list[float], dict[str, Any]]


def train(folder: Path, ep_size: int = 1, stop: int | None = None, **settings: Any) -> Outcome:
    """Return history, losses and results of a run, which ends early at `stop`."""
    config = dynamic_config(folder, **settings)
    callbacks = [] if stop is None else [in_hook("on_step_end", lambda trainer: trainer.request_stop("enough"), stop)]
    with dynamic_trainer(config, ep_size=ep_size, callbacks=callbacks) as (trainer, lifecycle):
        results = trainer.fit()
        assert_in_bounds(lifecycle, config.lifecycle.min_experts)
    if dist.is_initialized():
        dist.barrier()
    return history_of(lifecycle), losses(folder), results


def assert_in_bounds(lifecycle: Lifecycle, fewest: int) -> None:
    for name, layer in lifecycle.layers.items():
        roster = lifecycle.rosters[name]
        assert fewest <= len(roster) <= roster.logical_experts
        used = {record.logical_id for record in roster.active}
        assert set(layer.router.active_E.nonzero().flatten().tolist()) == used
        for logical_id in range(roster.logical_experts):
            place = layer.placement.owner(logical_id)
            if place.rank == layer.expert_stack.groups.ep_rank:
                assert bool(layer.experts.up[place.slot].any()) == (logical_id in used)
        per_rank = [len(used & set(slots)) for slots in layer.placement.slots]
        assert max(per_rank) - min(per_rank) <= 1 or lifecycle.history[-1].kind != "sleep"


def assert_same_run(found: Outcome, expected: Outcome, tolerance: float = 1e-5) -> None:
    assert found[0] == expected[0]
    assert relative_difference(torch.tensor(found[1]), torch.tensor(expected[1])) <= tolerance
    assert found[2]["test_loss"] == pytest.approx(expected[2]["test_loss"], rel=tolerance)


def kinds_in(outcome: Outcome) -> list[str]:
    return [kind for _, kind, _ in outcome[0]]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Outcome of one process without interruption."""
    return run_distributed(train, 1, tmp_path_factory.mktemp("reference") / "run")[0]


def test_run_has_events_of_all_kinds(reference):
    history, _, results = reference
    kinds = kinds_in(reference)
    assert kinds.count("sleep") >= 5
    assert {"grow", "merge", "prune", "undone"} <= set(kinds)
    created = [uids[0] for _, kind, uids in history if kind == "grow"]
    assert created == sorted(set(created)) == list(range(3, 3 + len(created)))
    assert all(step >= 50 for step, kind, _ in history if kind == "grow"), "before the data shifted"
    assert results["lifecycle_sleep"] == kinds.count("sleep")


def test_two_ranks_equal_one_process(tmp_path, reference):
    for found in run_distributed(train, 2, tmp_path / "run", 2):
        assert_same_run(found, reference)


def test_resume_after_every_third_event_with_another_world_size_equals_reference(tmp_path, reference):
    stops = sorted({step for step, _, _ in reference[0]} | {20, 55})[2::3]
    for stop, (world, ep_size) in zip(stops, [(4, 2), (1, 1), (4, 4)], strict=True):
        run_distributed(train, world, tmp_path / "run", ep_size, stop)
    for found in run_distributed(train, 2, tmp_path / "run", 2):
        assert_same_run(found, reference)


def test_resume_with_the_same_world_size_is_bitwise_identical(tmp_path, reference):
    for stop in (71, None):
        (found,) = run_distributed(train, 1, tmp_path / "run", 1, stop)
    assert_same_run(found, reference, tolerance=0)


def weights_after_removals(folder: Path, ep_size: int) -> tuple[dict[str, Tensor], int]:
    """Return weights and number of removals of a run that reuses ids of removed experts after replay."""
    lifecycle = EVENTFUL.replace(undo_above=5.0, replay_steps=5, trial_gain=0.5, grow_every=5, prune_below=0.3)
    with dynamic_trainer(dynamic_config(folder, lifecycle=lifecycle), ep_size=ep_size) as (trainer, watched):
        trainer.fit()
        removals = sum(kind in ("merge", "prune") for _, kind, _ in history_of(watched))
        return whole_state_dict(trainer.raw_model), removals


def test_replay_does_not_depend_on_the_world_size(tmp_path):
    expected, removals = weights_after_removals(tmp_path / "1", 1)
    assert removals > 5
    (found, _), *_ = run_distributed(weights_after_removals, 4, tmp_path / "4", 4)
    for name, value in expected.items():
        assert not value.is_floating_point() or relative_difference(found[name], value) < 1e-10, name


def test_replay_restores_learning_rates_and_draws_new_augmentations(tmp_path):
    visits_of: list[Tensor] = []

    def watched(batch: Batch, visits: Tensor) -> Batch:
        visits_of.append(visits)
        return batch

    rates: set[float] = set()
    record = in_hook("on_step_start", lambda trainer, _: rates.add(trainer.optimizer.param_groups[0]["lr"]))
    config = dynamic_config(tmp_path / "run", max_steps=30)
    with dynamic_trainer(config, callbacks=[record], augment=watched) as (trainer, lifecycle):
        trainer.schedule = None
        trainer.fit()
    sleeps = [kind for _, kind, _ in history_of(lifecycle)].count("sleep")
    assert sleeps >= 2
    assert rates == {0.01}
    assert len(visits_of) == 30 + sleeps * EVENTFUL.replay_steps
    assert len(torch.cat(visits_of).unique()) == len(torch.cat(visits_of))


def test_run_without_sleep_only_grows(tmp_path):
    outcome = train(tmp_path / "run", max_steps=70, lifecycle=EVENTFUL.replace(sleep_every=None))
    assert set(kinds_in(outcome)) == {"grow"}


def test_undone_replay_equals_a_run_without_replay(tmp_path):
    lifecycle = EVENTFUL.replace(check_every=None, merge_distance=None, prune_below=0)
    harmful = lifecycle.replace(replay_lr=10.0, replay_steps=1, undo_above=0.0)
    found = train(tmp_path / "harmful", max_steps=60, lifecycle=harmful)
    expected = train(tmp_path / "without", max_steps=60, lifecycle=lifecycle.replace(replay_steps=0))
    assert set(kinds_in(found)) == {"sleep", "undone"}
    assert kinds_in(found).count("undone") >= 3
    assert found[1] == expected[1]
    assert found[2]["test_loss"] == expected[2]["test_loss"]


def rows_in_use(folder: Path, ep_size: int, all_rows: bool) -> tuple[Outcome, list[int], list[int], list[int]]:
    """Return an outcome, and of each step the expert rows in the backward pass, in the optimizer step, and up to the
    last active expert."""
    with dynamic_trainer(dynamic_config(folder, max_steps=40), ep_size=ep_size) as (trainer, lifecycle):
        (layer,) = lifecycle.layers.values()
        if all_rows:
            lifecycle.experts.mark_rows_in_use = lambda: None
        backward, stepped, active_rows = [], [], []
        layer.experts.up.register_post_accumulate_grad_hook(lambda up: backward.append(len(up.grad)))

        def watch(*_: Any) -> None:
            assert len(layer.experts.up) == len(layer.experts.down)
            stepped.append(len(layer.experts.up))
            active = layer.router.active_E.nonzero().flatten().tolist()
            here = layer.placement.slots[layer.expert_stack.groups.ep_rank]
            active_rows.append(max(slot + 1 for slot, expert in enumerate(here) if expert in active))

        unwrapped(trainer.optimizer).register_step_post_hook(watch)
        results = trainer.fit()
        assert {len(weight) for weight in (layer.experts.up, layer.experts.down)} == {8 // ep_size}
    return (history_of(lifecycle), losses(folder), results), backward, stepped, active_rows


def rows_in_use_and_all_rows(folder: Path, ep_size: int) -> list[Any]:
    return [rows_in_use(folder / str(all_rows), ep_size, all_rows) for all_rows in (False, True)]


@pytest.mark.parametrize("ep_size", [1, 2])
def test_rows_of_inactive_experts_have_no_gradients_and_are_not_stepped(tmp_path, ep_size):
    (found, backward, stepped, active_rows), (expected, *_) = run_distributed(
        rows_in_use_and_all_rows, 2, tmp_path, ep_size
    )[0]
    assert stepped[0] == backward[0] == 8 // ep_size
    assert stepped[1:] == active_rows[1:]
    in_ddp = [8] * len(active_rows)  # DDP's buckets keep their size
    assert backward[1:] == (in_ddp if ep_size == 1 else active_rows)[1:]
    assert min(active_rows) < 8 // ep_size
    assert_same_run(found, expected, tolerance=1e-12)


def test_split_expert_is_kept_for_its_gain(tmp_path):
    scheduled = EVENTFUL.replace(merge_distance=None, prune_below=0, grow_every=7, trial_gain=0.0)
    kept = train(tmp_path / "kept", lifecycle=scheduled)
    tried = [uids[0] for _, kind, uids in kept[0] if kind in ("kept", "prune")]
    assert len(tried) == len(set(tried))
    assert kept[2]["lifecycle_kept"] >= 1
    assert min(step for step, kind, _ in kept[0] if kind == "grow") == 7
    _, _, pruned = train(tmp_path / "pruned", lifecycle=scheduled.replace(trial_gain=1e9))
    assert pruned["lifecycle_kept"] == 0
    assert pruned["lifecycle_prune"] >= 2


def test_end_of_run_prunes_idle_experts_and_splits_none_too_young(tmp_path):
    lifecycle = EVENTFUL.replace(min_sleep_every=None, sleep_every=500, grow_every=5, merge_distance=None, min_age=30)
    config = dynamic_config(tmp_path / "run", lifecycle=lifecycle, max_experts=32)
    with dynamic_trainer(config) as (trainer, watched):
        trainer.fit()
    steps_of = {kind: [step for step, found, _ in history_of(watched) if found == kind] for kind in COUNTED}
    assert max(steps_of["grow"]) == trainer.max_steps - 30
    assert set(steps_of["prune"]) == {trainer.max_steps}
