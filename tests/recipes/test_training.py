"""Training of recipes other than language models: on two processes, after a stop, with various settings."""

import os

import pytest
import torch
from safetensors.torch import load_file

import toolkit as tk
from benchmarks.support.precision import in_float64
from benchmarks.support.processes import ROOT, run_distributed
from recipes import few_labels, har, lmu_speech, mnist_moe, psmnist, vae_robustness
from tests.recipes.runs import assert_equal_curves, assert_figures, drawn, losses, metrics, results, train_with_stop
from tests.support.forked_python import run_forked
from toolkit.data.images import ImageData
from toolkit.errors import UserError
from toolkit.run import cli
from toolkit.run.tracking.jsonl import read_metrics

RUNS = {
    # With few steps, pseudo-labels need a low confidence and a low weight.
    few_labels: {"confidence": 0.11, "lr": 5e-3, "pseudo_label_weight": 0.1, "entropy_weight": 0.1, "max_steps": 12},
    har: {},
    # The last batch of an epoch has 40 of 480 utterances.
    lmu_speech: {"epochs": 1, "batch_size": 44},
    psmnist: {"epochs": 1},
    vae_robustness: {"epochs": 1, "corruption_rate": 0.2, "corruption": "resampled", "log_every": 10},
}
IDS = [recipe.__name__.rpartition(".")[2] for recipe in RUNS]
LEAKAGE = ("mig", "style_information", "one_style_probe", "all_styles_probe")


def config(recipe, folder, **changes):
    settings = {"run_dir": folder, "tracker": "none", "cpu": True, "log_every": 4}
    return recipe.debug().replace(**{**settings, **changes})


def train(folder, name):
    os.environ["TOOLKIT_CACHE_DIR"] = str(folder / f"cache of {name}")
    os.environ.pop("TOOLKIT_DATA_DIR", None)
    with in_float64():
        for recipe, changes in RUNS.items():
            recipe.main(config(recipe, folder / recipe.__name__ / name, **changes))
            if name == "one":
                train_with_stop(recipe.main, config(recipe, folder / recipe.__name__ / "stopped", **changes), 7)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    run_distributed(train, 1, folder, "one")
    run_distributed(train, 2, folder, "two")
    return folder


@pytest.mark.parametrize("recipe", RUNS, ids=IDS)
def test_two_processes_equal_one(recipe, runs):
    one, two = runs / recipe.__name__ / "one", runs / recipe.__name__ / "two"
    assert_equal_curves(two, one)
    for name, value in results(one).items():
        if name.startswith("test_") and isinstance(value, float):
            assert results(two)[name] == pytest.approx(value, rel=1e-9), name


@pytest.mark.parametrize("recipe", RUNS, ids=IDS)
def test_resumed_run_equals_uninterrupted_run(recipe, runs):
    assert metrics(runs / recipe.__name__ / "stopped") == metrics(runs / recipe.__name__ / "one")


@pytest.mark.parametrize(("recipe", "accuracy"), [(har, 0.8), (psmnist, 0.2), (vae_robustness, 0.3)])
def test_recipe_learns(recipe, accuracy, runs):
    run = runs / recipe.__name__ / "one"
    assert results(run)["test_accuracy"] > accuracy
    assert losses(run)[-1] < losses(run)[0]


def test_few_labels_has_confident_answers(runs):
    first, *_, last = metrics(runs / few_labels.__name__ / "one")
    assert last["train/confident"] > 0
    assert last["train/cross_entropy"] < first["train/cross_entropy"]


def test_vae_improves_bound_and_reports_leakage(runs):
    one, two = (runs / vae_robustness.__name__ / name for name in ("one", "two"))
    first, *_, last = metrics(one)
    assert last["train/elbo"] > first["train/elbo"] + 20, "nats per image"
    assert last["train/cross_entropy"] < first["train/cross_entropy"] < 2.4
    assert last["eval/loss"] > 0, "nats per image; grey digits have some hundred"
    for name in LEAKAGE:
        assert 0 <= results(one)[name] <= 1
        assert results(one)[name] == pytest.approx(results(two)[name], abs=0.03)
    assert drawn(one) == ["leakage", "loss", "reconstructions", "samples"]


@pytest.mark.parametrize(
    ("recipe", "changes", "facts"),
    [
        (few_labels, {"method": "vat"}, {}),
        (few_labels, {"method": "supervised", "mixed_precision": "bf16"}, {}),
        (vae_robustness, {"objective": "supervised"}, {}),
        (vae_robustness, {"objective": "pseudo_label"}, {}),
        (vae_robustness, {"objective": "reference", "labels": 400}, {}),
        (vae_robustness, {"mixed_precision": "bf16", "gradient_accumulation_steps": 2}, {}),
        (psmnist, {"unit": "cell", "order": 8, "hidden_size": 8}, {}),
        (lmu_speech, {"encoder": "attention", "width": 64, "thetas": (50.0,), "stride": 1}, {}),
        (
            lmu_speech,
            {"held_out_speaker": "voice 2", "beam_size": 2, "lexicon": True},
            {"dataset": "tones without voice 2"},
        ),
    ],
)
def test_other_settings_train(recipe, changes, facts, tmp_path):
    found = recipe.main(config(recipe, tmp_path, max_steps=2, **changes))
    assert found | {"steps": 2, **facts} == found
    assert ("error_rates" in drawn(tmp_path)) == (recipe is lmu_speech)
    if recipe is vae_robustness:
        assert ("mig" in found) == (changes.get("objective") not in ("supervised", "pseudo_label"))


@pytest.mark.parametrize(
    ("recipe", "changes", "message"),
    [
        (few_labels, {"confidence": 0.0}, "^confidence="),
        (vae_robustness, {"labels": 5}, "labels=5: take 10 to 1442"),
        (vae_robustness, {"labels": 10_000}, "labels=10000: take 10 to"),
        (har, {"fold": 5}, "fold=5: take 0 to 4"),
        (har, {"freeze_encoder": True}, "freeze_encoder=True: say which encoder with encoder_path"),
        (lmu_speech, {"lexicon": True}, "lexicon=True: give beam_size, too"),
        (lmu_speech, {"thetas": ()}, "thetas=.*: tuple should have at least 1 item"),
        (lmu_speech, {"encoder": "attention", "width": 100}, "width=100: take a multiple of 64"),
        (psmnist, {"blank_pixels": 1.0}, "blank_pixels=1.0: input should be less than 1"),
    ],
)
def test_invalid_settings_raise(recipe, changes, message, tmp_path):
    with pytest.raises(UserError, match=message):
        recipe.main(config(recipe, tmp_path / "run", **changes))


TABLE = tk.TensorTable(input=torch.zeros(1, 28, 28, dtype=torch.uint8), label=torch.zeros(1, dtype=torch.int64))
MNIST_SHAPED = ImageData("digits", TABLE, TABLE, mean=0.5, std=0.5)


@pytest.mark.parametrize(("preset", "parameters"), [(psmnist.parallel, 166_092), (psmnist.cell, 102_027)])
def test_psmnist_presets_have_published_parameter_counts(preset, parameters):
    assert sum(p.numel() for p in psmnist.build_model(preset(), MNIST_SHAPED).parameters()) == parameters


@pytest.mark.parametrize("unit", ["parallel", "cell"])
def test_psmnist_pixel_order_depends_on_permutation_seed_only(unit):
    torch.manual_seed(0)
    small = psmnist.Config(unit=unit, order=8, hidden_size=6)
    model = psmnist.build_model(small, MNIST_SHAPED).eval()
    assert sorted(model.order.tolist()) == list(range(784))
    assert torch.equal(model.order, psmnist.build_model(small.replace(seed=1), MNIST_SHAPED).order)
    assert not torch.equal(model.order, psmnist.build_model(small.replace(permutation=1), MNIST_SHAPED).order)
    images = torch.zeros(2, 28, 28, dtype=torch.uint8)
    images[1].view(-1)[model.order[-1]] = 255
    logits = model(images)
    assert not torch.allclose(logits[0], logits[1])


@pytest.mark.parametrize("objective", ["exact", "supervised"])
def test_vae_classifier_hidden_size_sets_layer_sizes(objective):
    small = vae_robustness.debug().replace(objective=objective, classifier_hidden_size=6)
    model, _ = vae_robustness.build(small, MNIST_SHAPED)
    assert [layer.out_features for layer in model.classifier if hasattr(layer, "out_features")] == [6, 3, 10]


def test_lmu_speech_debug_preset_learns_and_saves_recogniser(tmp_path):
    done = run_forked("recipes/lmu_speech.py", "debug", "--cpu", "--tracker", "none", "--run-dir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "Synthetic tones instead of speech" in done.stdout
    facts = results(tmp_path)
    assert (facts["dataset"], facts["parameters"]) == ("tones", 48_909)
    first, *_, last = losses(tmp_path)
    # Four seeds: 0.31 to 0.35 of the first loss, 64 to 75 % of the characters wrong; a silent model has 100 %.
    assert last < 0.4 * first
    assert facts["test_cer"] < 0.85
    assert (tmp_path / "transcripts.txt").read_text().count("\nreference   ") == 50
    assert {path.name for path in (tmp_path / "recogniser").iterdir()} == {"config.json", "model.safetensors"}


def test_lmu_speech_digits_train_classifier_without_recogniser(tmp_path):
    facts = lmu_speech.main(config(lmu_speech, tmp_path, target="digits", epochs=2, batch_size=32))
    assert facts["test_accuracy"] > 0.3  # four seeds: 0.41 to 0.48
    assert not (tmp_path / "recogniser").exists()


def test_full_preset_balances_experts(tmp_path):
    """Over five seeds the greatest load is 1.09 to 1.41 times the mean, the least 0.77 to 0.93 times."""
    facts = mnist_moe.main(mnist_moe.full().replace(dataset="digits", cpu=True, tracker="none", run_dir=tmp_path))
    [load_E] = facts["expert_load"].values()
    assert len(load_E) == 8
    assert sum(load_E) == pytest.approx(1, abs=1e-3)
    assert 0.4 <= 8 * min(load_E) <= 8 * max(load_E) <= 1.5
    assert "expert_load_notice" not in facts


def test_dynamic_preset_splits_experts_and_prunes_unneeded_experts(tmp_path):
    dynamic = mnist_moe.dynamic().replace(dataset="digits", run_dir=tmp_path, cpu=True, tracker="none")
    facts = mnist_moe.main(dynamic)
    events = [event for line in read_metrics(tmp_path / "lifecycle.jsonl") for event in line["events"]]
    assert dynamic.lifecycle.min_experts <= facts["active_experts"] <= dynamic.max_experts
    assert facts["min_expert_load"] * facts["active_experts"] > 0.05
    assert facts["lifecycle_grow"] >= 4
    assert min(facts["lifecycle_merge"] + facts["lifecycle_prune"], facts["lifecycle_sleep"]) >= 3
    changes = {"grow": 1, "merge": -1, "prune": -1}
    assert facts["active_experts"] == 4 + sum(changes.get(event["kind"], 0) for event in events)
    trials = [event for event in events if "gain" in event["detail"]]
    assert {event["kind"] for event in trials} <= {"kept", "prune"}
    for event in trials:
        detail = event["detail"]
        assert (event["kind"] == "kept") == (detail["gain"] >= dynamic.lifecycle.trial_gain)
        assert detail["gain"] == pytest.approx(detail["loss_without"] / detail["loss"] - 1)
    assert "split off" in (tmp_path / "summary.txt").read_text()
    assert_figures(tmp_path)
    assert results(tmp_path)["lifecycle_kept"] == facts["lifecycle_kept"]


@pytest.fixture(scope="module")
def har_runs(tmp_path_factory):
    """Folder of a pretrained and of a frozen encoder."""
    folder = tmp_path_factory.mktemp("har")
    settings = {"tracker": "none", "cpu": True}
    har.main(har.debug().replace(run_dir=folder / "pretrained", max_steps=2, **settings))
    settings |= {"encoder_path": folder / "pretrained/checkpoints/step-00000002/model.safetensors"}
    settings |= {"freeze_encoder": True, "class_balance": "sqrt", "hidden_dims": (8,)}
    settings |= {"scale_lr": 32, "schedule": tk.ScheduleOptions(warmup_epochs=1), "epochs": 2}
    har.main(har.debug().replace(run_dir=folder / "frozen", **settings))
    return folder


def test_har_frozen_encoder_is_unchanged_and_classifier_learns(har_runs):
    before, after = (
        load_file(max(har_runs.glob(f"{name}/checkpoints/step-*/model.safetensors")))
        for name in ("pretrained", "frozen")
    )
    encoder = [name for name in before if name.startswith("encoder.")]
    assert encoder
    assert all(torch.equal(before[name], after[name]) for name in encoder)
    assert losses(har_runs / "frozen")[-1] < losses(har_runs / "frozen")[0]


def test_har_results_and_summary_describe_data_and_scores(har_runs):
    facts = results(har_runs / "frozen")
    assert facts["dataset_notice"] == "Made-up volunteers say nothing about people."
    assert facts["held_out_volunteers"] == ["made-up-04", "made-up-09"]
    assert (facts["class_balance"], facts["frozen"], facts["mode"]) == ("sqrt", True, "all_channels")
    assert set(facts["class_counts"]) == set(facts["classes"])
    summary = (har_runs / "frozen" / "summary.txt").read_text()
    assert "macro-F1" in summary
    assert "Made-up volunteers" in summary
    assert drawn(har_runs / "frozen") == ["confusion", "loss", "scores"]


@pytest.mark.parametrize(("run", "rate"), [("pretrained", 4e-3), ("frozen", 8e-3)])
def test_har_learning_rate_scales_with_batch_and_warms_up(har_runs, run, rate):
    facts = results(har_runs / run)
    assert (facts["effective_batch_size"], facts["peak_learning_rate"]) == (64, rate)
    if run == "frozen":  # 11 warm-up steps; the log step 5 has the rate of the fifth
        assert metrics(har_runs / run)[0]["train/learning_rate"] == pytest.approx(rate * 5 / 12)


def batch_table():
    """Return the cells of the batch table in docs/recipes/har.md."""
    page = (ROOT / "docs" / "recipes" / "har.md").read_text()
    section = page.partition("## Multi-GPU training")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    assert {row[0] for row in rows[2:]} == {"1", "2", "4", "8"}
    return rows[2:]


@pytest.mark.parametrize("row", batch_table(), ids=lambda row: f"{row[0]}x{row[1]}x{row[2]}")
def test_har_flags_of_batch_table_give_its_values(row):
    gpus, per_gpu, accumulation, effective, rate, warmup, flags = row
    parsed = cli.parse(har.PRESETS, flags.strip("`").split())
    assert (parsed.num_processes or 1, parsed.gradient_accumulation_steps) == (int(gpus), int(accumulation))
    assert parsed.batch_size == int(effective) == int(gpus) * int(per_gpu) * int(accumulation)
    assert parsed.peak_lr == pytest.approx(float(rate))
    assert parsed.schedule.warmup_epochs == float(warmup)
