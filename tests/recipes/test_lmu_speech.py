"""The speech recipe: what it learns, on how many processes, and what it leaves behind."""

import json
import os
from pathlib import Path

import pytest

import toolkit as tk
from recipes.lmu_speech import Config, connected, debug, fsdd, guide, main
from tests.support.equality import IN_FLOAT64, in_float64
from tests.support.forked_python import run_forked
from tests.support.helpers import run_distributed
from tests.support.preempted import preempted_at
from toolkit.run.tracking.jsonl import read_metrics


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("TOOLKIT_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.delenv("TOOLKIT_DATA_DIR", raising=False)


def config(folder: Path, **settings) -> Config:
    # 480 utterances in batches of 44: the last batch of an epoch has 40, and one of 4 micro-batches at most is uneven.
    settings = {"epochs": 1, "batch_size": 44, "log_every": 2} | settings
    return debug().replace(run_dir=folder, tracker="none", cpu=True, **settings)


def losses(folder: Path) -> list[float]:
    return [line["train/loss"] for line in read_metrics(folder / "metrics.jsonl") if "train/loss" in line]


def train_on_ranks(folder: Path) -> dict:
    # Ranks have the environment of the server that forks them, which may be older than this test.
    os.environ["TOOLKIT_CACHE_DIR"] = str(folder.parent / "cache")
    with in_float64():
        return main(config(folder))


def test_two_processes_learn_the_curve_of_one_and_count_each_utterance_once(tmp_path):
    alone = train_on_ranks(tmp_path / "one")
    for results in run_distributed(train_on_ranks, 2, tmp_path / "two"):
        for name in ("test_loss", "test_wer", "test_cer", "test_sentence_accuracy"):
            assert results[name] == pytest.approx(alone[name], rel=IN_FLOAT64), name
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=IN_FLOAT64)
    assert len(losses(tmp_path / "one")) == 6


def test_the_debug_preset_learns_resumes_and_leaves_a_recogniser(tmp_path, monkeypatch):
    whole = run_forked(
        "recipes/lmu_speech.py", "debug", "--cpu", "--tracker", "none", "--run-dir", str(tmp_path / "whole")
    )
    assert whole.returncode == 0, whole.stderr
    assert "Synthetic tones instead of speech" in whole.stdout
    results = json.loads((tmp_path / "whole" / "results.json").read_text())
    assert (results["dataset"], results["parameters"]) == ("tones", 48_909)
    first, *_, last = losses(tmp_path / "whole")
    # Four seeds: 0.31 to 0.35 of the first loss, 64 to 75 % of the characters wrong; a model that is silent has 100 %.
    assert last < 0.4 * first
    assert results["test_cer"] < 0.85
    assert {path.name for path in (tmp_path / "whole" / "recogniser").iterdir()} == {"config.json", "model.safetensors"}
    # Stopped within the last of six epochs, and continued.
    halfway = debug().replace(run_dir=tmp_path / "run", tracker="none", cpu=True)
    with preempted_at(165):
        main(halfway)
    monkeypatch.setenv("TOOLKIT_CACHE_DIR", str(tmp_path / "cache"))
    main(halfway)
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "whole"), rel=1e-3)


def test_digits_may_be_classes(tmp_path):
    results = main(config(tmp_path / "run", target="digits", epochs=2, batch_size=32))
    assert results["test_accuracy"] > 0.3  # four seeds: 0.41 to 0.48
    assert not (tmp_path / "run" / "recogniser").exists()


def test_the_guides_encoder_trains_too(tmp_path):
    attention = {"encoder": "attention", "width": 64, "thetas": (50.0,), "stride": 1, "max_steps": 2}
    assert main(config(tmp_path / "run", **attention))["steps"] == 2


def test_a_speaker_is_held_out_by_name(tmp_path):
    results = main(config(tmp_path / "run", held_out_speaker="voice 2", max_steps=1, beam_size=2, lexicon=True))
    assert results["dataset"] == "tones without voice 2"


def test_every_preset_is_a_valid_configuration():
    assert {preset.__name__: preset().dataset for preset in (fsdd, connected, debug, guide)} == {
        "fsdd": "auto",
        "connected": "connected_digits",
        "debug": "tones",
        "guide": "librispeech",
    }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"width": 0}, "width=0: input should"),
        ({"beam_size": 0}, "beam_size=0: input should"),
        ({"lexicon": True}, "lexicon=True: give beam_size, too"),
        ({"thetas": ()}, "thetas=.*: tuple should have at least 1 item"),
        ({"dropout": 1.0}, "dropout=1.0: input should be less than 1"),
        ({"tail_s": -1.0}, "tail_s=-1.0: input should"),
        ({"encoder": "attention", "width": 100}, "width=100: take a multiple of 64"),
    ],
)
def test_a_wrong_setting_is_named(settings, message):
    with pytest.raises(tk.UserError, match=message):
        Config(**settings)


def test_the_learning_rate_scales_with_the_effective_batch():
    # The guide's table: 16 utterances per GPU and 1e-3 for each of them.
    warm = tk.ScheduleOptions(warmup_steps=500)
    for gpus, rate in {1: 1e-3, 2: 2e-3, 4: 4e-3, 8: 8e-3}.items():
        scaled = Config(batch_size=16 * gpus, lr=1e-3, scale_lr=16, schedule=warm)
        assert scaled.peak_lr == pytest.approx(rate)
