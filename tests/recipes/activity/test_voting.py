"""Votes over views, and scores that come from counts: the same however examples are cut into batches and ranks."""

from __future__ import annotations

import pytest
import torch
from sklearn.metrics import confusion_matrix, f1_score
from torch import nn
from torch.nn import functional as F

from activity.voting import VotedClassification, class_weights, macro_f1, vote
from toolkit.train.metrics import MetricSums

CLASSES, VIEWS = 4, 3


class Given(nn.Module):
    """Logits that come in the batch."""

    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        return logits


def batch(examples: int, seed: int = 0, views: int = VIEWS) -> dict[str, torch.Tensor]:
    draws = torch.Generator().manual_seed(seed)
    return {
        "input": torch.randn(examples, views, CLASSES, generator=draws) * 3,
        "label": torch.randint(CLASSES - 1, (examples,), generator=draws),
    }


def test_a_vote_is_the_mean_of_probabilities():
    logits = torch.tensor([[[0.9, 0.1, 0.0], [0.2, 0.8, 0.0], [0.2, 0.8, 0.0]]]).log()
    assert vote(logits).exp()[0].tolist() == pytest.approx([1.3 / 3, 1.7 / 3, 0.0])
    one = batch(5, views=1)["input"]
    torch.testing.assert_close(vote(one), one[:, 0].log_softmax(-1))


def test_the_weights_of_classes_stay_on_the_device_of_the_first_batch():
    task = VotedClassification(class_weights=torch.ones(CLASSES))
    task.loss(Given(), {name: column.to("meta") for name, column in batch(5).items()})
    assert task.class_weights.device.type == "meta"


def test_training_takes_the_mean_over_views_and_weighs_classes():
    weights = torch.tensor([1.0, 2.0, 0.5, 1.0])
    given = batch(7)
    loss = VotedClassification(class_weights=weights).loss(Given(), given)
    expected = sum(
        weights[label] * F.cross_entropy(view, label)
        for views, label in zip(given["input"], given["label"], strict=True)
        for view in views
    )
    assert loss.sum.item() == pytest.approx(expected.item() / VIEWS, rel=1e-6)
    assert loss.count == 7


@pytest.mark.parametrize("seed", range(4))
def test_scores_do_not_depend_on_the_batches_and_are_those_of_scikit_learn(seed):
    task, given = VotedClassification(), batch(23, seed)
    answers = vote(given["input"]).argmax(-1)
    summaries = []
    for sizes in ([23], [10, 0, 13], [1] * 23):
        sums = MetricSums(torch.device("cpu"))
        pieces = [
            dict(zip(given, columns, strict=True))
            for columns in zip(*(v.split(sizes) for v in given.values()), strict=True)
        ]
        for piece in pieces:
            loss = task.evaluate(Given(), piece)
            sums.add({"loss": loss.sum, **loss.sums}, loss.count)
        summaries.append(task.summarise(sums.compute()))
    for summary in summaries:
        assert summary["loss"] == pytest.approx(F.nll_loss(vote(given["input"]), given["label"]).item(), rel=1e-5)
        assert summary["confusion"] == summaries[0]["confusion"]
        assert summary["macro_f1"] == pytest.approx(f1_score(given["label"], answers, average="macro"))
        counts = (23 * torch.tensor(summary["confusion"])).round().int().tolist()
        assert counts == confusion_matrix(given["label"], answers, labels=range(CLASSES)).tolist()


def test_a_class_that_is_neither_there_nor_answered_does_not_count():
    # Classes 0 and 1: F1 of 2*3/(2*3+1) and 2*2/(2*2+1); class 2 never occurs.
    assert macro_f1([[3, 1, 0], [0, 2, 0], [0, 0, 0]]) == pytest.approx((6 / 7 + 4 / 5) / 2)


def test_weights_are_one_on_average_and_make_rare_classes_count():
    counts = torch.tensor([90, 9, 1, 0])
    for balance, ratio in (("inverse", 90.0), ("sqrt", 90**0.5)):
        weights = class_weights(counts, balance)
        assert (weights * counts).sum().item() == pytest.approx(100)
        assert (weights[2] / weights[0]).item() == pytest.approx(ratio)
        assert weights[3] == 0
    assert class_weights(counts, "none") is None
