"""The recipe lm_moe. `docs/recipes/language_model.md` runs the debug preset unchanged."""

import logging
import os
from itertools import pairwise

import pytest

from benchmarks.support.processes import run_distributed
from language.small_models import describe_language_model
from recipes import lm_moe
from tests.recipes.runs import (
    assert_equal_curves,
    bits_per_byte,
    drawn,
    load_bytes,
    losses,
    main_in_float64,
    metrics,
    results,
    train_with_stop,
    write_corpus,
)
from toolkit.commands import main as toolkit_command
from toolkit.errors import UserError
from toolkit.experts.moving.replan_options import ReplanOptions
from toolkit.experts.routing.traces import read_trace
from toolkit.run import cli
from toolkit.run.config.callback_options import CheckpointOptions

STEPS, STOP_AT = 12, 7


def corpus(folder):
    write_corpus(folder / "play.txt")
    return folder


def config(folder, run, **changes):
    os.environ["TOOLKIT_CACHE_DIR"] = str(folder / "cache")
    settings = {
        "dataset": "folder",
        "data_dir": folder / "corpus",
        "run_dir": folder / run,
        "max_steps": STEPS,
        "log_every": 2,
    }
    return lm_moe.debug().replace(**{**settings, **changes}, tracker="none", cpu=True)


def train(config):
    main_in_float64(lm_moe, config)


def train_single(folder):
    train(config(folder, "one"))


def train_two(folder):
    moved = {"replan": ReplanOptions(planner="swap", every=3, guarded=False), "record_traces": True, "export": True}
    train(config(folder, "two", **moved))
    train(config(folder, "fsdp2", dense_parallel="fsdp2"))
    # The checkpoint with the greatest loss counts as best, so that the last is not best.
    best = CheckpointOptions(best="test/loss", best_mode="max")
    train(config(folder, "best", eval_every=0.25, checkpoint=best, **moved))
    lm_moe.main(config(folder, "from weights", model=str(folder / "two" / "model"), max_steps=5))
    train_with_stop(train, config(folder, "stopped", **moved), STOP_AT)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lm_moe")
    corpus(folder / "corpus")
    run_distributed(train_single, 1, folder)
    run_distributed(train_two, 2, folder)
    return folder


def test_two_processes_that_move_experts_equal_one(runs):
    assert {"train/loss", "train/penalty", "train/grad_norm"} <= metrics(runs / "one")[-1].keys()
    for run in ("two", "fsdp2"):
        assert_equal_curves(runs / run, runs / "one")
    assert losses(runs / "one")[-1] < losses(runs / "one")[0] - 0.05


def test_moves_are_recorded_and_drawn(runs):
    facts, lines = results(runs / "two"), metrics(runs / "two")
    assert facts["migrated_experts"] > 0
    for layer, placement in facts["expert_placement"].items():
        recorded = [line[f"moe/placement/{layer}"] for line in lines if f"moe/placement/{layer}" in line]
        assert [recorded[0], recorded[-1]] == [facts["placement_before_moves"][layer], placement]
        assert len(recorded) < len(lines)
        assert all(before != after for before, after in pairwise(recorded)), "recorded without a move"
    assert ["expert_moves" in drawn(runs / run) for run in ("two", "fsdp2")] == [True, False]
    assert not any(name.startswith("moe/placement") for line in metrics(runs / "fsdp2") for name in line)


def test_resumed_run_equals_uninterrupted_run(runs):
    assert metrics(runs / "stopped") == metrics(runs / "two")
    weights = [runs / run / "model" / "model.safetensors" for run in ("stopped", "two")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert (runs / "stopped" / f"traces-{STOP_AT + 1}.npz").exists()  # ranks agree to stop one step later


def test_traces_are_input_of_lab(runs, capsys):
    trace = read_trace(runs / "two" / "traces.npz")
    assert trace.layers == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    # Each step routes every token of 32 blocks of 32 to two experts, in both layers.
    assert trace.load_TLSE().sum((2, 3)).tolist() == [[2 * 32 * 32] * 2] * STEPS
    assert len(trace.placements) > 1
    assert toolkit_command(["lab", str(runs / "two" / "traces.npz"), "--planner", "swap", "--every", "5"]) == 0
    assert f"4 experts on 2 ranks, 2 layer(s), {STEPS} steps" in capsys.readouterr().out


@pytest.mark.parametrize(("run", "step"), [("two", None), ("best", 6)])
def test_exported_model_in_transformers_has_equal_bits_per_byte(run, step, runs):
    facts = results(runs / run)
    assert facts.get("best_checkpoint", {}).get("step") == step
    bits = bits_per_byte(runs / run / "model", load_bytes("folder", runs / "corpus"))
    assert bits == pytest.approx(facts["test_bits_per_byte"], rel=1e-5)
    figure = f"{facts['test_bits_per_byte']:.4f}"
    assert f"{figure} bits per byte" in (runs / run / "model" / "README.md").read_text()
    assert f"{figure} bits/byte" in (runs / run / "summary.txt").read_text()


def test_training_starts_from_exported_weights(runs):
    assert losses(runs / "from weights")[0] < losses(runs / "one")[-1]


def test_dense_preset_has_active_parameters_of_moe_preset():
    logging.getLogger("transformers").setLevel(logging.ERROR)
    moe, dense = (describe_language_model(lm_moe.build_model(preset(), 256)) for preset in (lm_moe.full, lm_moe.dense))
    assert moe["active_parameters"] <= dense["active_parameters"] < 1.002 * moe["active_parameters"]
    assert dense["parameters"] == dense["active_parameters"] < moe["parameters"]


def test_model_without_experts_trains(tmp_path):
    corpus(tmp_path / "corpus")
    facts = lm_moe.main(config(tmp_path, "dense", experts=0, top_k=1, max_steps=2))
    assert facts["parameters"] == facts["active_parameters"]


def test_sample_tokens_longer_than_context_raises():
    with pytest.raises(UserError, match="context=16: take more than sample_tokens=16"):
        cli.parse(lm_moe.PRESETS, ["debug", "--context", "16"])
