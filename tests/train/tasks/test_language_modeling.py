"""The loss of a language model is a sum over targets, in nats, and means bits per byte."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from toolkit.train.tasks.language_modeling import LanguageModeling

LN2 = math.log(2)


class Bigram(nn.Module):
    """Logits that depend on the last token alone."""

    def __init__(self, vocab_size: int):
        super().__init__()
        self.table = nn.Embedding(vocab_size, vocab_size)

    def forward(self, input_ids: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.table(input_ids))


@pytest.fixture
def uniform() -> Bigram:
    model = Bigram(256)
    nn.init.zeros_(model.table.weight)
    return model


def test_a_model_that_knows_nothing_needs_eight_bits_for_a_byte(uniform):
    tokens = torch.tensor([[1, 2, 3, 4], [4, 5, -1, -1]], dtype=torch.int32)
    loss = LanguageModeling().evaluate(uniform, {"tokens": tokens})
    assert int(loss.count) == 4  # 2, 3, 4 and 5
    assert loss.sum.item() == pytest.approx(4 * 8 * LN2)
    assert loss.sums["bits_per_byte"].item() == pytest.approx(4 * 8)


def test_bits_per_byte_do_not_depend_on_how_long_tokens_are(uniform):
    # Two bytes a token: 8 bits each are 4 bits per byte.
    loss = LanguageModeling(bytes_per_token=2.0).evaluate(uniform, {"tokens": torch.tensor([[1, 2, 3]])})
    assert loss.sums["bits_per_byte"].item() / int(loss.count) == pytest.approx(4)


def test_the_training_loss_is_that_of_transformers_times_the_targets():
    torch.manual_seed(0)
    model = Bigram(16)
    tokens = torch.randint(16, (3, 9))
    task = LanguageModeling(penalty=lambda: torch.tensor(7.0))
    loss = task.loss(model, {"tokens": tokens.to(torch.uint8)})
    mean = nn.functional.cross_entropy(model(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten())
    assert loss.count == task.count({"tokens": tokens}) == 24
    assert loss.sum.item() == pytest.approx(24 * mean.item())
    assert loss.penalty == 7


def test_tokens_that_are_no_targets_are_read_and_counted_by_nobody():
    """The sums and counts of two processes' parts add up to those of the whole: an unequal number of targets each."""
    torch.manual_seed(0)
    model = Bigram(16)
    tokens = torch.randint(16, (4, 9))
    learned = torch.arange(36).view(4, 9) % 5 == 2
    learned[3] = False
    marked = torch.where(learned, tokens, ~tokens).int()
    task = LanguageModeling()
    every = nn.functional.cross_entropy(
        model(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
    )
    loss = task.loss(model, {"tokens": marked})
    assert loss.count == task.count({"tokens": marked}) == int(learned[:, 1:].sum()) == 5
    assert loss.sum.item() == pytest.approx(every[learned[:, 1:].flatten()].sum().item())
    assert task.evaluate(model, {"tokens": marked}).sum.item() == loss.sum.item()
    parts = [task.loss(model, {"tokens": part}) for part in marked.split([1, 3])]
    assert sum(part.count for part in parts) == loss.count
    assert sum(part.sum.item() for part in parts) == pytest.approx(loss.sum.item())


def test_an_empty_batch_costs_nothing_and_stays_connected(uniform):
    task, batch = LanguageModeling(), {"tokens": torch.zeros(0, 5, dtype=torch.uint8)}
    loss = task.loss(uniform, batch)
    loss.sum.backward()
    assert (loss.sum.item(), loss.count) == (0, 0)
    assert uniform.table.weight.grad is not None
    assert not uniform.table.weight.grad.any()
    assert uniform.training
    assert int(task.evaluate(uniform, batch).count) == 0
