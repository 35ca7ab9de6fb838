"""The loss of language models, in nats, and bits per byte."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.support.families import VOCAB, config, tiny_config
from benchmarks.support.precision import in_float64
from toolkit.integrations.peft.adapter_options import AdapterOptions
from toolkit.integrations.peft.adapters import add_adapters
from toolkit.integrations.transformers import causal_lm, use_toolkit_kernel
from toolkit.train.fine_tuning_memory import Layout, fine_tuning_memory
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
    task = LanguageModeling(penalty=SimpleNamespace(share=lambda: torch.tensor(7.0)))
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


def loss_and_gradients(model: nn.Module, tokens: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    loss = LanguageModeling().loss(model, {"tokens": tokens})
    loss.sum.backward()
    return [loss.sum.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "granitemoe"])
@pytest.mark.parametrize("lora_rank", [0, 2])
def test_chunked_loss_equals_unchunked_loss(family, lora_rank, monkeypatch):
    torch.manual_seed(0)
    scaled = family == "granitemoe"
    own = tiny_config(family, logits_scaling=8.0) if scaled else config(family)
    tokens = torch.randint(3, 60, (3, 12))
    tokens[1, 6:] = -1
    task, batch, chunks = LanguageModeling(), {"tokens": tokens}, []
    module = "toolkit.train.tasks.language_modeling"
    monkeypatch.setattr(f"{module}.checkpoint", lambda *a, **kw: chunks.append(a) or checkpoint(*a, **kw))
    with in_float64():
        model = add_adapters(
            causal_lm(own, dtype=torch.float64, experts_implementation=use_toolkit_kernel()),
            AdapterOptions(lora_rank=lora_rank),
        )
        whole = loss_and_gradients(model, tokens)
        assert not chunks
        monkeypatch.setattr(f"{module}.LOGITS_AT_ONCE", 5 * VOCAB)
        found = loss_and_gradients(model, tokens)
        assert len(chunks) == (0 if scaled else 7)
        with torch.no_grad():
            found += [task.evaluate(model, batch).sum]
    torch.testing.assert_close(found, [*whole, whole[0]], rtol=1e-12, atol=1e-12)
    assert model(input_ids=tokens[:, :4].clamp(min=0)).logits.shape == (3, 4, VOCAB)


def test_chunked_loss_holds_logits_of_one_chunk(monkeypatch):
    def step(at_once: int) -> int:
        monkeypatch.setattr("toolkit.train.tasks.language_modeling.LOGITS_AT_ONCE", at_once)
        layout = Layout(ep_size=1, sequences=1, context=1024, dtype=torch.float32)
        return fine_tuning_memory(tiny_config("mixtral", vocab_size=32_768), layout, lambda model: model).step

    logits = 1024 * 32_768 * 4
    whole, chunked = step(2**26), step(64 * 32_768)
    assert whole > 2 * logits
    assert chunked < logits
