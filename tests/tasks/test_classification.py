"""Labels without a class are refused before anything is learned from them; the model gets the columns it asked for."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import toolkit as tk
from toolkit.errors import UserError


@pytest.mark.parametrize(
    ("wrong", "label", "says"),
    [
        (
            "train",
            4,
            "the training data have the label 4 in row 6 of the column `label`: the model has 4 classes, 0 to 3",
        ),
        ("test", -1, "the test data have the label -1 in row 6 of the column `label`"),
    ],
)
def test_a_label_without_a_class_is_refused_with_its_row(tmp_path: Path, wrong: str, label: int, says: str):
    tables = {name: tk.TensorTable(input=torch.randn(16, 4), label=torch.arange(16) % 4) for name in ("train", "test")}
    tables[wrong].columns["label"][6] = label
    config = tk.RunConfig(run_dir=tmp_path, tracker="none", cpu=True, batch_size=2, epochs=1)
    with tk.start_run("mine", config) as run, pytest.raises(UserError, match=says):
        tk.standard_trainer(run, tk.Classification(), nn.Linear(4, 4), **tables).fit()


def test_labels_that_the_loss_leaves_out_are_no_fault():
    task = tk.Classification()
    task.expect(training=torch.tensor([0, -100, 3]))
    task.loss(nn.Linear(4, 4), {"input": torch.randn(2, 4), "label": torch.tensor([-100, 3])})


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
