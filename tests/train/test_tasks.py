"""Classification and language modeling: invalid and ignored labels, the loss in nats, and bits per byte."""

import math
from pathlib import Path
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
