"""Votes over views, scores from counts, and confusion matrices."""

import json

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image
from sklearn.metrics import confusion_matrix, f1_score
from torch import nn
from torch.nn import functional as F

from activity.confusion import draw_confusion, draw_last_confusion
from activity.voting import VotedClassification, class_weights, macro_f1, vote
from tests.recipes.pieces import pieces
from toolkit.run.tracking.jsonl import last_tables
from toolkit.train.metrics import MetricSums

CLASSES = 4
MODEL = nn.Identity()
"""The logits are the input."""


def batch(examples, seed=0, views=3):
    draws = torch.Generator().manual_seed(seed)
    return {
        "input": torch.randn(examples, views, CLASSES, generator=draws) * 3,
        "label": torch.randint(CLASSES - 1, (examples,), generator=draws),
    }


def test_vote_is_mean_of_probabilities():
    logits = torch.tensor([[[0.9, 0.1, 0.0], [0.2, 0.8, 0.0], [0.2, 0.8, 0.0]]]).log()
    assert vote(logits).exp()[0].tolist() == pytest.approx([1.3 / 3, 1.7 / 3, 0.0])
    one = batch(5, views=1)["input"]
    torch.testing.assert_close(vote(one), one[:, 0].log_softmax(-1))


def test_class_weights_stay_on_device_of_first_batch():
    task = VotedClassification(class_weights=torch.ones(CLASSES))
    task.loss(MODEL, {name: column.to("meta") for name, column in batch(5).items()})
    assert task.class_weights.device.type == "meta"


def test_loss_is_weighted_mean_over_views():
    weights, samples = torch.tensor([1.0, 2.0, 0.5, 1.0]), batch(7)
    loss = VotedClassification(class_weights=weights).loss(MODEL, samples)
    views = samples["input"].transpose(0, 1)
    expected = sum(F.cross_entropy(view, samples["label"], weights, reduction="sum") for view in views)
    assert loss.sum.item() == pytest.approx(expected.item() / len(views), rel=1e-6)
    assert loss.count == 7


@pytest.mark.parametrize("seed", range(4))
def test_scores_equal_scikit_learn_in_any_batches(seed):
    task, samples = VotedClassification(), batch(23, seed)
    labels, answers = samples["label"], vote(samples["input"]).argmax(-1)
    summaries = []
    for sizes in ([23], [10, 0, 13], [1] * 23):
        sums = MetricSums(torch.device("cpu"))
        for piece in pieces(samples, sizes):
            loss = task.evaluate(MODEL, piece)
            sums.add({"loss": loss.sum, **loss.sums}, loss.count)
        summaries.append(task.summarise(sums.compute()))
    for summary in summaries:
        assert summary["loss"] == pytest.approx(F.nll_loss(vote(samples["input"]), labels).item(), rel=1e-5)
        assert summary["confusion"] == summaries[0]["confusion"]
        assert summary["macro_f1"] == pytest.approx(f1_score(labels, answers, average="macro"))
        counts = (23 * torch.tensor(summary["confusion"])).round().int().tolist()
        assert counts == confusion_matrix(labels, answers, labels=range(CLASSES)).tolist()


def test_macro_f1_ignores_class_without_examples_and_answers():
    # F1 of class 0: 2*3/(2*3+1); of class 1: 2*2/(2*2+1).
    assert macro_f1([[3, 1, 0], [0, 2, 0], [0, 0, 0]]) == pytest.approx((6 / 7 + 4 / 5) / 2)


def test_class_weights_average_one_and_grow_for_rare_classes():
    counts = torch.tensor([90, 9, 1, 0])
    for balance, ratio in (("inverse", 90.0), ("sqrt", 90**0.5)):
        weights = class_weights(counts, balance)
        assert (weights * counts).sum().item() == pytest.approx(100)
        assert (weights[2] / weights[0]).item() == pytest.approx(ratio)
        assert weights[3] == 0
    assert class_weights(counts, "none") is None


SHARES = [[0.5, 0.125, 0.0], [0.0, 0.375, 0.0], [0.0, 0.0, 0.0]]


def test_draw_confusion_shows_percent_of_row_and_examples():
    figure = Figure()
    draw_confusion(figure, SHARES, ["walk", "use_telephone", "never_seen"], 16)
    axes = figure.axes[0]
    cells = {text.get_position(): text.get_text() for text in axes.texts}
    assert cells == {(0, 0): "80", (1, 0): "20", (1, 1): "100"}
    rows, columns = (
        [label.get_text() for label in labels] for labels in (axes.get_yticklabels(), axes.get_xticklabels())
    )
    assert rows == ["walk  (10)", "use telephone  (6)", "never seen  (0)"]
    assert columns == ["walk", "use telephone", "never seen"]


def test_draw_last_confusion_draws_last_evaluation(tmp_path):
    tables = [[[0.5, 0.0], [0.5, 0.0]], [[0.5, 0], [0, 0.5]]]
    lines = [json.dumps({"step": step, "eval/confusion": table}) for step, table in enumerate(tables)]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, ""]))
    pictures = draw_last_confusion(tmp_path, {"classes": ["a", "b"], "test_examples": 4})
    assert list(pictures) == ["confusion"]
    with Image.open(pictures["confusion"]) as image:
        pixels = np.asarray(image.convert("RGB")).astype(int)
    blue = pixels[..., 2] - pixels[..., 0] > 60
    half = blue.shape[1] // 2
    assert blue[:, :half].sum() > 1000, "first diagonal cell"
    assert blue[:, half:].sum() > 1000, "second diagonal cell"


def test_trackers_get_confusion_as_table_of_last_evaluation():
    lines = [{"step": 1, "eval/confusion": [[1.0]]}, {"step": 2, "eval/confusion": SHARES, "moe/placement/0": [[0]]}]
    assert last_tables(lines) == {"eval/confusion": SHARES}
