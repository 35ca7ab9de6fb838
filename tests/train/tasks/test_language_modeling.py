"""The loss of language models, in nats, and bits per byte."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from toolkit.train.tasks.language_modeling import LanguageModeling


class Bigram(nn.Module):
    """A model whose logits depend on the last token only."""

    def __init__(self, vocab_size: int):
        super().__init__()
        self.table = nn.Embedding(vocab_size, vocab_size)

    def forward(self, input_ids: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.table(input_ids))


@pytest.fixture
def uniform():
    model = Bigram(256)
    nn.init.zeros_(model.table.weight)
    return model


@pytest.mark.parametrize(("bytes_per_token", "bits"), [(1.0, 8), (2.0, 4)])
def test_uniform_model_needs_eight_bits_per_token(uniform, bytes_per_token, bits):
    tokens = torch.tensor([[1, 2, 3, 4], [4, 5, -1, -1]], dtype=torch.int32)
    loss = LanguageModeling(bytes_per_token=bytes_per_token).evaluate(uniform, {"tokens": tokens})
    assert int(loss.count) == 4
    assert loss.sum.item() == pytest.approx(4 * 8 * math.log(2))
    assert loss.sums["bits_per_byte"].item() == pytest.approx(4 * bits)


def test_loss_sums_cross_entropy_over_marked_targets():
    torch.manual_seed(0)
    model, tokens = Bigram(16), torch.randint(16, (4, 9))
    learned = torch.arange(36).view(4, 9) % 5 == 2
    learned[3] = False
    marked = torch.where(learned, tokens, ~tokens).int()
    logits, targets = model(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten()
    expected = nn.functional.cross_entropy(logits, targets, reduction="none")
    task = LanguageModeling(penalty=lambda: torch.tensor(7.0))
    for batch, counts in [(tokens.to(torch.uint8), torch.ones(4, 9, dtype=torch.bool)), (marked, learned)]:
        loss = task.loss(model, {"tokens": batch})
        assert loss.count == task.count({"tokens": batch}) == int(counts[:, 1:].sum())
        assert loss.sum.item() == pytest.approx(expected[counts[:, 1:].flatten()].sum().item())
        assert task.evaluate(model, {"tokens": batch}).sum.item() == loss.sum.item()
        assert loss.penalty == 7
        parts = [task.loss(model, {"tokens": part}) for part in batch.split([1, 3])]
        assert sum(part.count for part in parts) == loss.count
        assert sum(part.sum.item() for part in parts) == pytest.approx(loss.sum.item())


def test_empty_batch_has_zero_loss_and_gradients(uniform):
    task, batch = LanguageModeling(), {"tokens": torch.zeros(0, 5, dtype=torch.uint8)}
    loss = task.loss(uniform, batch)
    loss.sum.backward()
    assert (loss.sum.item(), loss.count) == (0, 0)
    assert uniform.table.weight.grad is not None
    assert not uniform.table.weight.grad.any()
    assert uniform.training
    assert int(task.evaluate(uniform, batch).count) == 0
