"""The recipe lm_moe: it resumes, does the same on two processes, and leaves traces and weights of use.

`docs/recipes/language_model.md` runs the debug preset as it is.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from language.small_models import describe_language_model
from recipes import lm_moe
from tests.support.equality import IN_FLOAT64, in_float64
from tests.support.helpers import run_distributed
from tests.support.preempted import preempted_at
from toolkit.commands import main as toolkit_command
from toolkit.data.text import load_text
from toolkit.errors import UserError
from toolkit.experts.moving.replan_options import ReplanOptions
from toolkit.experts.routing.traces import read_trace
from toolkit.integrations.transformers import use_toolkit_kernel
from toolkit.run import cli
from toolkit.run.config.callback_options import CheckpointOptions
from toolkit.run.tracking.jsonl import read_metrics
from toolkit.train.tasks.language_modeling import LanguageModeling

STOP_AT = 7


def corpus(folder: Path) -> Path:
    """A small text whose words come in an order that can be learned, in part."""
    folder.mkdir()
    draws = random.Random(0)
    lines = (" ".join(draws.choices(["to be", "or not", "that is", "the question"], k=6)) for _ in range(500))
    (folder / "play.txt").write_text("\n".join(lines))
    return folder


def config(folder: Path, run: str, **changes: Any) -> lm_moe.Config:
    usual = {
        "dataset": "folder",
        "data_dir": folder / "corpus",
        "run_dir": folder / run,
        "tracker": "none",
        "cpu": True,
    }
    return lm_moe.debug().replace(**usual, **changes)


def main_in_float64(config: lm_moe.Config) -> None:
    build_model = lm_moe.build_model
    with in_float64(), mock.patch.object(lm_moe, "build_model", lambda *args: build_model(*args).double()):
        lm_moe.main(config)


def train(folder: Path, stop: bool) -> None:
    """A run left alone, with everything on; and one that is stopped and continued."""
    os.environ["TOOLKIT_CACHE_DIR"] = str(folder / "cache")
    moved = {"replan": ReplanOptions(planner="swap", every=3, guarded=False), "record_traces": True, "export": True}
    if not stop:
        main_in_float64(config(folder, "one"))
        return
    main_in_float64(config(folder, "two", **moved))
    main_in_float64(config(folder, "cut", dense_parallel="fsdp2"))
    worst = CheckpointOptions(best="test/loss")
    with mock.patch(
        "toolkit.train.callbacks.checkpointing.is_share", return_value=True
    ):  # so that the last is not best
        main_in_float64(config(folder, "best", eval_every=0.25, checkpoint=worst, **moved))
    lm_moe.main(config(folder, "from weights", model=str(folder / "two" / "model"), max_steps=5))
    with preempted_at(STOP_AT):
        main_in_float64(config(folder, "stopped", **moved))
    main_in_float64(config(folder, "stopped", **moved))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of "one" process; "two" that own and move experts; "cut", with FSDP2; "best", which keeps the worst of
    its checkpoints; "from weights" of "two"; and "stopped", which was continued."""
    folder = tmp_path_factory.mktemp("lm_moe")
    corpus(folder / "corpus")
    run_distributed(train, 1, folder, False)
    run_distributed(train, 2, folder, True)
    return folder


def metrics(run: Path) -> list[dict[str, Any]]:
    return list(read_metrics(run / "metrics.jsonl"))


def test_two_processes_that_own_and_move_experts_do_what_one_does(runs):
    for other in ("two", "cut"):
        for mine, theirs in zip(metrics(runs / other), metrics(runs / "one"), strict=True):
            learned = {name for name in theirs if name.startswith(("train/", "eval/"))}
            assert learned >= {"train/loss", "train/penalty", "train/grad_norm"}
            assert {k: mine[k] for k in learned} == pytest.approx({k: theirs[k] for k in learned}, rel=IN_FLOAT64)
    assert json.loads((runs / "two" / "results.json").read_text())["migrated_experts"] > 0
    losses = [line["train/loss"] for line in metrics(runs / "one")]
    assert losses[-1] < losses[0] - 0.05


def test_a_stopped_run_goes_on_as_if_it_had_not_been(runs):
    def lines(run: str) -> list[dict[str, Any]]:
        return [{k: v for k, v in line.items() if not k.startswith("perf/")} for line in metrics(runs / run)]

    assert lines("stopped") == lines("two")
    weights = [runs / run / "model" / "model.safetensors" for run in ("stopped", "two")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert (runs / "stopped" / f"traces-{STOP_AT + 1}.npz").exists()  # ranks agree to stop one step later


def test_its_traces_feed_the_placement_lab(runs, capsys):
    trace = read_trace(runs / "two" / "traces.npz")
    assert trace.layers == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    # Each step routes every token of 32 blocks of 32 to two experts, in both layers.
    assert trace.load_TLSE().sum((2, 3)).tolist() == [[2 * 32 * 32] * 2] * 20
    assert len(trace.placements) > 1
    assert toolkit_command(["lab", str(runs / "two" / "traces.npz"), "--planner", "swap", "--every", "5"]) == 0
    assert "4 experts on 2 ranks, 2 layer(s), 20 steps" in capsys.readouterr().out


@pytest.mark.parametrize(("run", "step"), [("two", None), ("best", 6)])
def test_plain_transformers_measures_the_same_bits_per_byte(run, step, runs):
    from transformers import AutoModelForCausalLM

    use_toolkit_kernel()
    results = json.loads((runs / run / "results.json").read_text())
    assert results.get("best_checkpoint", {}).get("step") == step
    model = AutoModelForCausalLM.from_pretrained(runs / run / "model", dtype=torch.float32).eval()
    data = load_text(
        "folder", runs / "corpus", tokenizer="bytes", block_size=32, batch_size=32, on_main=lambda decide: decide()
    )
    with torch.no_grad():
        loss = LanguageModeling().evaluate(model, data.test.columns)
    bits = loss.sums["bits_per_byte"].item() / int(loss.count)
    assert bits == pytest.approx(results["test_bits_per_byte"], rel=1e-5)
    figure = f"{results['test_bits_per_byte']:.4f}"
    assert f"{figure} bits per byte" in (runs / run / "model" / "README.md").read_text()
    assert f"{figure} bits/byte" in (runs / run / "summary.txt").read_text()


def test_it_trains_on_from_exported_weights(runs):
    assert metrics(runs / "from weights")[0]["train/loss"] < metrics(runs / "one")[-1]["train/loss"]


def test_the_dense_preset_has_as_many_active_parameters_as_the_mixture():
    import logging

    logging.getLogger("transformers").setLevel(logging.ERROR)
    mixture, dense = (describe_language_model(lm_moe.build_model(make(), 256)) for make in (lm_moe.full, lm_moe.dense))
    assert mixture["active_parameters"] <= dense["active_parameters"] < 1.002 * mixture["active_parameters"]
    assert dense["parameters"] == dense["active_parameters"] < mixture["parameters"]


def test_a_model_without_experts_trains(tmp_path: Path):
    corpus(tmp_path / "corpus")
    results = lm_moe.main(config(tmp_path, "dense", experts=0, top_k=1, max_steps=2))
    assert results["parameters"] == results["active_parameters"]


def test_samples_that_are_longer_than_the_context_are_refused():
    with pytest.raises(UserError, match="--context 16: take more than --sample-tokens 16"):
        cli.parse(lm_moe.PRESETS, ["debug", "--context", "16"])
