"""Labels without a class raise before anything is learned, and ignored labels are not counted."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import toolkit as tk
from tests.support.emulated_device import emulate
from tests.support.equality import IN_FLOAT64, in_float64
from tests.support.helpers import run_distributed
from tests.support.trainers import standard_trainer
from toolkit.errors import UserError
from toolkit.run.tracking.jsonl import read_metrics


@pytest.mark.parametrize(("wrong", "label"), [("train", 4), ("test", -1)])
def test_classification_label_without_a_class_raises_with_its_row(tmp_path: Path, wrong: str, label: int):
    tables = {name: tk.TensorTable(input=torch.randn(16, 4), label=torch.arange(16) % 4) for name in ("train", "test")}
    tables[wrong].columns["label"][6] = label
    tables[wrong].columns["label"][7] = -100
    config = tk.RunConfig(run_dir=tmp_path, tracker="none", cpu=True, batch_size=2, epochs=1)
    said = rf"row 6 of the {wrong}(ing)? data has {label}\. The model has 4 classes"
    with tk.start_run("mine", config) as run, pytest.raises(UserError, match=said):
        standard_trainer(run, tk.Classification(), nn.Linear(4, 4), **tables).fit()


class Scaled(nn.Module):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x * scale[:, None]


def test_each_forward_gives_the_model_the_columns_that_were_named():
    task = tk.Classification(inputs=("input", "scale"))
    batch = {"input": torch.randn(3, 4), "scale": torch.tensor([1.0, 2.0, 0.0]), "label": torch.tensor([0, 3, 1])}
    losses = task.sample_losses(Scaled(), batch)
    assert losses[2].item() == pytest.approx(math.log(4))
    for loss in (task.loss(Scaled(), batch), task.evaluate(Scaled(), batch)):
        assert loss.sum.item() == pytest.approx(losses.sum().item())


def partly_labelled() -> dict[str, Tensor]:
    """Half of the labels are left out, among them all of the last batch of eight."""
    draws = torch.Generator().manual_seed(3)
    label = torch.arange(24) % 4
    label[[0, 1, 5, 9, *range(16, 24)]] = -100
    return {"input": torch.randn(24, 4, generator=draws, dtype=torch.float64), "label": label}


def start() -> nn.Linear:
    torch.manual_seed(5)
    return nn.Linear(4, 4)


class InOrder:
    """Rows in their order, in batches of eight."""

    steps_per_epoch = 3

    def samples_before(self, step: int) -> int:
        return 8 * step

    def epoch_of(self, step: int) -> int:
        return step // 3

    def batches(self, start_step: int) -> Any:
        return (torch.arange(8) + 8 * (step % 3) for step in range(start_step, 100))


def train(folder: Path, micro_batches: int, as_table: bool) -> tuple[list[dict[str, Any]], Any]:
    config = tk.RunConfig(
        run_dir=folder,
        tracker="none",
        cpu=True,
        batch_size=8,
        epochs=1,
        log_every=1,
        gradient_accumulation_steps=micro_batches,
        optimizer=tk.OptimizerOptions(max_grad_norm=None),
    )
    columns = partly_labelled()
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    table = tk.TensorTable(**columns)
    with in_float64(), tk.start_run("mine", config) as run:
        data: Any = {"train": table, "order": InOrder()} if as_table else {"train": DataLoader(rows, batch_size=8)}
        trainer = standard_trainer(run, tk.Classification(), start(), test=table if as_table else rows, **data)
        results = trainer.fit()
        results["true"] = F.cross_entropy(trainer.raw_model(columns["input"]), columns["label"]).item()
    return list(read_metrics(folder / "metrics.jsonl")), results


@pytest.mark.parametrize(("processes", "micro_batches", "as_table"), [(1, 1, True), (1, 2, False), (2, 2, True)])
def test_means_are_over_the_labels_that_count(tmp_path: Path, processes: int, micro_batches: int, as_table: bool):
    for lines, results in run_distributed(train, processes, tmp_path, micro_batches, as_table):
        with in_float64():
            model, first = start(), {name: column[:8] for name, column in partly_labelled().items()}
            loss = F.cross_entropy(model(first["input"]), first["label"])
            loss.backward()
        norm = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).norm()
        assert lines[0]["train/loss"] == pytest.approx(loss.item(), rel=IN_FLOAT64)
        assert lines[0]["train/grad_norm"] == pytest.approx(norm.item(), rel=IN_FLOAT64)
        assert results["test_loss"] == pytest.approx(results["true"], rel=IN_FLOAT64)
        # Nothing counts in the third batch: it has no mean, and no gradient.
        assert "train/loss" not in lines[2]
        assert lines[2]["train/grad_norm"] == 0


def counted_on_the_device() -> None:
    task = tk.Classification()
    with emulate() as device:
        model = nn.Linear(4, 4).to(device.device)
        batch = {"input": torch.randn(3, 4), "label": torch.tensor([0, -100, 3])}
        batch = {name: column.to(device.device, non_blocking=True) for name, column in batch.items()}
        device.waits.clear()
        counts = [task.count(batch), task.loss(model, batch).count, task.evaluate(model, batch).count]
        assert device.waits == []
        assert [int(count) for count in counts] == [2, 2, 2]


def test_a_gpu_is_not_waited_for_to_count_labels():
    run_distributed(counted_on_the_device, 1)
