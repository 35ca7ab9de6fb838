"""A run is continued on the data that it began with, or refused in one line."""

import json

import pytest
import torch
import torch.distributed as dist

import toolkit as tk
from tests.support.helpers import run_distributed
from tests.support.small_run import Stop, small_config, small_trainer, train
from toolkit.data.identity import identity_of
from toolkit.errors import Preempted
from toolkit.run.data import record_data


def train_on(folder, *, rows=None, stop=None, **settings):
    """The small run with one label changed and the last rows left out, where `rows` says how many are kept."""
    with small_trainer(small_config(folder, **settings), stop) as trainer:
        if rows is not None:
            columns = {name: column[:rows].clone() for name, column in trainer.batches.table.columns.items()}
            columns["label"][0] = (columns["label"][0] + 1) % 3
            trainer.batches.table = tk.TensorTable(**columns)
        return trainer.fit()


def test_a_run_is_not_continued_on_other_data(tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(Preempted):
        train(small_config(folder), Stop(7, "SIGTERM"))
    with pytest.raises(
        tk.UserError, match=r"started with train data of 95 rows .*, not of 94 rows .*\. Give the dataset"
    ):
        train_on(folder, rows=94)
    with pytest.raises(tk.UserError, match="started with train data of 95 rows"):
        train_on(folder, rows=95)
    written = json.loads((folder / "config.json").read_text())["data_identity"]
    assert (written["train"]["rows"], written["test"]["rows"]) == (95, 95)
    train(small_config(folder))  # and the right ones continue after that


def test_a_checkpoint_keeps_the_identity_when_config_json_is_gone(tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(Preempted):
        train(small_config(folder), Stop(7, "SIGTERM"))
    (folder / "config.json").unlink()
    with pytest.raises(tk.UserError, match="it was made with train data of 95 rows"):
        train_on(folder, rows=95)


def refusals(folder) -> str:
    """What a rank is told whose data are not those of the first."""
    config = small_config(folder, num_processes=2)
    with tk.start_run("small", config) as run, pytest.raises(tk.UserError) as told:
        record_data(run, train=identity_of(tk.TensorTable(label=torch.arange(4 + dist.get_rank()))))
    return str(told.value)


def test_processes_with_different_data_are_refused_on_every_rank(tmp_path):
    first, second = run_distributed(refusals, 2, tmp_path / "run")
    assert first == second
    assert "process 0 has train data of 4 rows" in first
    assert "5 rows" in first
