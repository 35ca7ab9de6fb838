"""Runs of recipes, and their records."""

import json
import random
from unittest import mock

import pytest
import torch
from PIL import Image
from transformers import AutoModelForCausalLM

from benchmarks.support.precision import IN_FLOAT64, in_float64
from language.small_models import language_model_config
from tests.support.trainers import metrics, preempted_at
from toolkit.data.text import load_text
from toolkit.integrations.transformers import causal_lm, use_toolkit_kernel
from toolkit.train.tasks.language_modeling import LanguageModeling


def losses(run):
    return [line["train/loss"] for line in metrics(run) if "train/loss" in line]


def results(run):
    return json.loads((run / "results.json").read_text())


def drawn(run):
    return sorted(path.stem for path in run.glob("*.png"))


def assert_figures(run, *, ranks=1):
    """Assert that a run with dynamic experts has its figures, which are not blank if one process drew them."""
    (graph,) = run.glob("knowledge_graph_epoch_*.png")
    of_ranks = ["expert_device_distribution", "rank_load"] if ranks > 1 else []
    names = sorted(["expert_activations", graph.stem, "training_metrics", *of_ranks])
    assert drawn(run) == names
    for name in names:
        with Image.open(run / f"{name}.png") as image:
            assert min(image.size) > 300, name
            darkest, lightest = image.convert("L").getextrema()
            assert ranks > 1 or darkest < 100 < 250 < lightest, name


def assert_equal_curves(run, reference):
    """Assert that training and evaluation metrics are equal up to rounding in float64."""
    for found, expected in zip(metrics(run), metrics(reference), strict=True):
        for name, value in expected.items():
            if name.startswith(("step", "train/", "eval", "old")):
                tolerant = pytest.approx(value, rel=IN_FLOAT64) if isinstance(value, float) else value
                assert found[name] == tolerant, name


def main_in_float64(recipe, config):
    """Train a recipe in float64, with a model that transformers builds in float32."""
    build_model = recipe.build_model
    with in_float64(), mock.patch.object(recipe, "build_model", lambda *args: build_model(*args).double()):
        return recipe.main(config)


def train_with_stop(main, config, step):
    """Train until preempted after `step` steps, then resume."""
    with preempted_at(step):
        main(config)
    main(config)


def write_corpus(path, phrases=("to be", "or not", "that is", "the question")):
    """Write a small text of `phrases` in random order."""
    draws = random.Random(0)
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(" ".join(draws.choices(phrases, k=6)) for _ in range(500)))


def save_language_model(folder, **changes):
    """Save an untrained MoE language model, or a dense one with `experts=0`."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "dim": 16, "layers": 2, "heads": 2, "context": 32}
    experts = {"experts": 4, "top_k": 2, "expert_hidden_size": 16}
    causal_lm(language_model_config("qwen3_moe", **{**sizes, **experts, **changes})).save_pretrained(folder)


def load_bytes(dataset, data_dir=None):
    settings = {"tokenizer": "bytes", "block_size": 32, "batch_size": 32}
    return load_text(str(dataset), data_dir, **settings, on_main=lambda decide: decide())


@torch.no_grad()
def bits_per_byte(model, data):
    """Evaluate the exported model in the folder `model` with transformers."""
    use_toolkit_kernel()
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    loss = LanguageModeling().evaluate(network, data.test.columns)
    return loss.sums["bits_per_byte"].item() / int(loss.count)
