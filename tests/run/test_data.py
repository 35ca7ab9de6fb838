"""Identity of the data of a run, checked on resume and across ranks."""

import json

import pytest
import torch
import torch.distributed as dist

import toolkit as tk
from benchmarks.support.processes import run_distributed
from tests.support.preempted import preempted_at
from tests.support.small_run import small_config, small_trainer, train
from toolkit.data.identity import identity_of
from toolkit.run.data import record_data


def train_on_changed_data(folder, rows):
    """Resume the small run on its first `rows` rows, with one other label."""
    with small_trainer(small_config(folder)) as trainer:
        columns = {name: column[:rows].clone() for name, column in trainer.batches.table.columns.items()}
        columns["label"][0] = (columns["label"][0] + 1) % 3
        trainer.batches.table = tk.TensorTable(**columns)
        trainer.fit()


def test_resume_on_other_data_raises(tmp_path):
    config = small_config(tmp_path / "run")
    with preempted_at(7):
        train(config)
    message = r"started with train data of 95 rows .*, not of 94 rows .*\. Give the dataset"
    with pytest.raises(tk.UserError, match=message):
        train_on_changed_data(config.run_dir, 94)
    with pytest.raises(tk.UserError, match="started with train data of 95 rows"):
        train_on_changed_data(config.run_dir, 95)
    written = config.run_dir / "config.json"
    identity = json.loads(written.read_text())["data_identity"]
    assert (identity["train"]["rows"], identity["test"]["rows"]) == (95, 95)
    written.unlink()
    with pytest.raises(tk.UserError, match="it was made with train data of 95 rows"):
        train_on_changed_data(config.run_dir, 95)
    train(config)


def error_of_rank(folder):
    """Return the error of a rank whose data differ from rank 0."""
    config = small_config(folder, num_processes=2)
    with tk.start_run("small", config) as run, pytest.raises(tk.UserError) as error:
        record_data(run, train=identity_of(tk.TensorTable(label=torch.arange(4 + dist.get_rank()))))
    return str(error.value)


def test_different_data_on_ranks_raise_on_every_rank(tmp_path):
    first, second = run_distributed(error_of_rank, 2, tmp_path / "run")
    assert first == second
    assert "process 0 has train data of 4 rows" in first
    assert "5 rows" in first
