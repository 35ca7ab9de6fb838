"""Classification and language modeling: invalid and ignored labels, the loss in nats, and bits per byte."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import toolkit as tk
from benchmarks.support.precision import IN_FLOAT64, in_float64
from benchmarks.support.processes import run_distributed
from tests.support.emulated_device import emulate
from tests.support.trainers import fit
from toolkit.errors import UserError
from toolkit.run.tracking.jsonl import read_metrics
from toolkit.train.tasks.language_modeling import LanguageModeling


@pytest.mark.parametrize(("split", "label"), [("train", 4), ("test", -1)])
def test_label_without_a_class_raises_with_its_row(tmp_path, split, label):
    tables = {name: tk.TensorTable(input=torch.randn(16, 4), label=torch.arange(16) % 4) for name in ("train", "test")}
    tables[split].columns["label"][6] = label
    tables[split].columns["label"][7] = -100
    with pytest.raises(UserError, match=rf"row 6 of the {split}(ing)? data has {label}\. The model has 4 classes"):
        fit(tmp_path, nn.Linear(4, 4), **tables, batch_size=2)


class Scaled(nn.Module):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x * scale[:, None]


def test_losses_pass_the_named_columns_to_the_model():
    task = tk.Classification(inputs=("input", "scale"))
    batch = {"input": torch.randn(3, 4), "scale": torch.tensor([1.0, 2.0, 0.0]), "label": torch.tensor([0, 3, 1])}
    losses = task.sample_losses(Scaled(), batch)
    assert losses[2].item() == pytest.approx(math.log(4))
    for loss in (task.loss(Scaled(), batch), task.evaluate(Scaled(), batch)):
        assert loss.sum.item() == pytest.approx(losses.sum().item())


def partly_labelled() -> tuple[Tensor, Tensor]:
    """Return inputs and labels of three batches of eight, without labels in the third."""
    label = torch.arange(24) % 4
    label[[0, 1, 5, 9, *range(16, 24)]] = -100
    return torch.randn(24, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64), label


def train(folder: Path, micro_batches: int) -> tuple[list[dict[str, Any]], float, list[float]]:
    """Return metrics, test loss, and the loss and gradient norm of torch for the first batch and the trained model."""
    torch.manual_seed(5)
    inputs, labels = partly_labelled()
    rows = [{"input": row, "label": label} for row, label in zip(inputs, labels, strict=True)]
    options = tk.OptimizerOptions(max_grad_norm=None)
    settings = {"log_every": 1, "gradient_accumulation_steps": micro_batches, "optimizer": options, "batch_size": 8}
    with in_float64():
        model = nn.Linear(4, 4)
        loss = F.cross_entropy(model(inputs[:8]), labels[:8])
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
        results = fit(folder, model, DataLoader(rows, batch_size=8), rows, **settings)  # type: ignore[arg-type]
        expected = [loss.item(), norm.item(), F.cross_entropy(model(inputs), labels).item()]
    return list(read_metrics(folder / "metrics.jsonl")), results["test_loss"], expected


@pytest.mark.parametrize(("processes", "micro_batches"), [(1, 1), (1, 2), (2, 2)])
def test_means_are_over_counted_labels(tmp_path, processes, micro_batches):
    for lines, test_loss, expected in run_distributed(train, processes, tmp_path, micro_batches):
        found = [lines[0]["train/loss"], lines[0]["train/grad_norm"], test_loss]
        assert found == pytest.approx(expected, rel=IN_FLOAT64)
        assert "train/loss" not in lines[2]
        assert lines[2]["train/grad_norm"] == 0


def count_on_the_device() -> None:
    task = tk.Classification()
    with emulate() as device:
        model = nn.Linear(4, 4).to(device.device)
        batch = {"input": torch.randn(3, 4), "label": torch.tensor([0, -100, 3])}
        batch = {name: column.to(device.device, non_blocking=True) for name, column in batch.items()}
        device.waits.clear()
        counts = [task.count(batch), task.loss(model, batch).count, task.evaluate(model, batch).count]
        assert device.waits == []
        assert [int(count) for count in counts] == [2, 2, 2]


def test_counting_labels_does_not_wait_for_the_device():
    run_distributed(count_on_the_device, 1)


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
