"""A DataLoader of one's own, and data sets without a length: any number of processes trains alike, and runs resume."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
)

import toolkit as tk
from tests.support.equality import IN_FLOAT64, in_float64
from tests.support.helpers import run_distributed
from tests.support.trainers import standard_trainer
from toolkit.errors import UserError
from toolkit.run.config.callback_options import CheckpointOptions
from toolkit.run.tracking.jsonl import read_metrics

SAMPLES, BATCH, STEPS_PER_EPOCH = 46, 8, 6


class Points(Dataset):
    """Points with noise that is drawn anew at each visit."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        return torch.full((4,), row / SAMPLES) + 0.01 * torch.randn(4), row % 3


class Stream(IterableDataset):
    """The same points in a row, and nobody knows how many."""

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        points = Points()
        return (points[row] for row in range(SAMPLES))


class OnlyOnce(IterableDataset):
    """A stream that is empty after it was read."""

    def __init__(self) -> None:
        self.points = iter(Stream())

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        return self.points


def collate(samples: list[tuple[Tensor, int]]) -> dict[str, Tensor]:
    inputs, labels = zip(*samples, strict=True)
    return {"input": torch.stack(inputs).to(torch.get_default_dtype()), "label": torch.tensor(labels)}


def loader(kind: str) -> DataLoader[Any]:
    settings: dict[str, Any] = {"batch_size": BATCH, "collate_fn": collate}
    if kind == "stream":
        return DataLoader(Stream(), **settings)
    if kind == "own generator":
        settings["generator"] = torch.Generator()
    if kind == "persistent workers":
        settings |= {"num_workers": 1, "persistent_workers": True}
    if kind == "batch sampler":
        sampler = BatchSampler(RandomSampler(Points(), generator=torch.Generator()), BATCH, drop_last=False)
        return DataLoader(Points(), batch_sampler=sampler, collate_fn=collate)
    return DataLoader(Points(), shuffle=True, **settings)


def train(folder: Path, kind: str, stop_at: int | None = None, **settings: Any) -> tuple[list[dict[str, Any]], Any]:
    """Lines of metrics and the results of `max_steps` steps, which are stopped once where `stop_at` says."""
    config = tk.RunConfig(
        run_dir=folder, tracker="none", cpu=True, **{"batch_size": BATCH, "max_steps": 15, "log_every": 1} | settings
    )

    class Stop(tk.Callback):
        def on_step_end(self, trainer: tk.Trainer) -> None:
            if trainer.state.step == stop_at:
                raise KeyboardInterrupt

    data = {"train": loader(kind), "test": loader("stream")}
    results: Any = None
    with in_float64():
        try:
            with tk.start_run("loaders", config) as run:
                torch.manual_seed(0)
                model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 3))
                trainer = standard_trainer(run, tk.Classification(), model, callbacks=[Stop()], **data)
                results = trainer.fit()
        except KeyboardInterrupt:
            return train(folder, kind, **settings)
    lines = list(read_metrics(folder / "metrics.jsonl"))
    return [{name: value for name, value in line.items() if not name.startswith("perf/")} for line in lines], results


@pytest.mark.parametrize("kind", ["shuffled", "own generator", "batch sampler", "persistent workers", "stream"])
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(tmp_path: Path, kind: str):
    settings = {"epochs": 3, "checkpoint": CheckpointOptions(every_steps=4)}
    whole, results = train(tmp_path / "whole", kind, **settings)
    stopped, again = train(tmp_path / "stopped", kind, stop_at=9, **settings)
    assert len(whole) == 15
    assert stopped == whole
    # The sixth batch of an epoch is short; a stream counts on from one pass into the next.
    assert results["samples"] == again["samples"] == 2 * SAMPLES + 3 * BATCH
    assert results["epochs"] == (1 if kind == "stream" else 15 / STEPS_PER_EPOCH)


@pytest.mark.parametrize("kind", ["shuffled", "stream"])
def test_two_processes_learn_what_one_does(tmp_path: Path, kind: str):
    settings: dict[str, Any] = {"gradient_accumulation_steps": 2, "epochs": 3, "max_steps": 7}
    (one,) = run_distributed(train_without_noise, 1, tmp_path / "one", kind, settings)
    two, other = run_distributed(train_without_noise, 2, tmp_path / "two", kind, settings)
    assert two[1]["samples"] == other[1]["samples"] == one[1]["samples"]
    for mine, theirs in zip(two[0], one[0], strict=True):
        for loss in {"train/loss", "eval/loss"} & theirs.keys():
            assert mine[loss] == pytest.approx(theirs[loss], rel=IN_FLOAT64)


def train_without_noise(folder: Path, kind: str, settings: dict[str, Any]) -> tuple[list[dict[str, Any]], Any]:
    nn.Dropout.forward = lambda self, x: x  # type: ignore[method-assign]  # noqa: ARG005
    return train(folder, kind, **settings)


def refusal(folder: Path, train_data: Any, **settings: Any) -> str:
    config = tk.RunConfig(run_dir=folder, tracker="none", cpu=True, **{"batch_size": BATCH} | settings)
    with tk.start_run("loaders", config) as run, pytest.raises(UserError) as refused:
        standard_trainer(run, tk.Classification(), nn.Linear(4, 3), train=train_data, test=loader("stream")).fit()
    return str(refused.value)


class Longer(Stream):
    """A stream that claims to have more points."""

    def __len__(self) -> int:
        return 70


@pytest.mark.parametrize(
    ("data", "settings", "says"),
    [
        (loader("shuffled"), {"batch_size": 16}, "batch_size=16: the DataLoader gives 8 samples"),
        (loader("stream"), {}, "max_steps=None: the training data have no length"),
        (DataLoader(Longer(), BATCH, collate_fn=collate), {"epochs": 2}, "ended after 6 batches, and its length is 9"),
        (
            DataLoader(Points(), BATCH, sampler=DistributedSampler(Points(), 2, 0)),
            {},
            "Leave it out: each process takes its part",
        ),
        (
            DataLoader(Points(), BATCH, collate_fn=lambda _rows: {"input": torch.zeros(3), "label": torch.zeros(2)}),
            {},
            "columns have unequal rows (input: 3, label: 2)",
        ),
        ([{"input": [0.0] * 4, "label": row % 3} for row in range(8)], {}, "unequal rows (input: 4, label: 8)"),
        ([(torch.zeros(4), 0, 0)] * 8, {}, "a batch is a list. Return samples as pairs (input, label) or"),
    ],
)
def test_fit_data_that_cannot_be_trained_on_raise(tmp_path: Path, data: Any, settings: dict[str, Any], says: str):
    assert says in refusal(tmp_path, data, **settings)


INPUTS, LABELS = torch.zeros(SAMPLES, 4), torch.arange(SAMPLES) % 3


@pytest.mark.parametrize("data", [TensorDataset, lambda *columns: DataLoader(TensorDataset(*columns), BATCH)])
def test_pairs_are_inputs_and_labels(tmp_path: Path, data: Callable[..., Any]):
    def fit(folder: str, train: Any) -> dict[str, Any]:
        config = tk.RunConfig(run_dir=tmp_path / folder, tracker="none", cpu=True, batch_size=BATCH, epochs=1)
        with tk.start_run("loaders", config) as run:
            torch.manual_seed(0)
            table = tk.TensorTable(input=INPUTS, label=LABELS)
            return standard_trainer(run, tk.Classification(), nn.Linear(4, 3), train=train, test=table).fit()

    named = [{"input": row, "label": label} for row, label in zip(INPUTS, LABELS, strict=True)]
    named = named if data is TensorDataset else DataLoader(named, BATCH)
    assert fit("pairs", data(INPUTS, LABELS))["test_loss"] == fit("named", named)["test_loss"]


@pytest.mark.parametrize("kind", [tuple, lambda rows: dict(enumerate(rows))])
def test_samples_may_be_in_a_tuple_or_by_number_in_a_dict(tmp_path: Path, kind: Callable[[list[Any]], Any]):
    data = kind([{"input": row, "label": label} for row, label in zip(INPUTS, LABELS, strict=True)])
    config = tk.RunConfig(run_dir=tmp_path, tracker="none", cpu=True, batch_size=BATCH, epochs=1)
    with tk.start_run("loaders", config) as run:
        results = standard_trainer(run, tk.Classification(), nn.Linear(4, 3), train=data, test=data).fit()
    assert results["samples"] == SAMPLES


def test_fit_test_data_that_are_empty_after_one_pass_raise(tmp_path: Path):
    config = tk.RunConfig(run_dir=tmp_path, tracker="none", cpu=True, batch_size=BATCH, epochs=2)
    data: Any = {"train": loader("shuffled"), "test": DataLoader(OnlyOnce(), BATCH, collate_fn=collate)}
    with tk.start_run("loaders", config) as run, pytest.raises(UserError, match="evaluate: 'eval' has no batches"):
        standard_trainer(run, tk.Classification(), nn.Linear(4, 3), **data).fit()


@pytest.mark.parametrize("method", ["loss", "evaluate"])
@pytest.mark.parametrize("result", [torch.tensor(1.0), (torch.tensor(1.0), 8), {"loss": torch.tensor(1.0)}])
def test_a_task_that_returns_no_loss_is_refused(tmp_path: Path, method: str, result: Any):
    task: Any = tk.Classification()
    setattr(task, method, lambda _model, _batch: result)
    config = tk.RunConfig(run_dir=tmp_path, tracker="none", cpu=True, batch_size=BATCH, epochs=1)
    with tk.start_run("loaders", config) as run:
        trainer = standard_trainer(run, task, nn.Linear(4, 3), train=loader("shuffled"), test=loader("stream"))
        with pytest.raises(UserError, match=f"task: `{method}` returns"):
            trainer.fit()


def shard_of_each_rank(folder: Path) -> str:
    rank = torch.distributed.get_rank()
    rows = [Points()[row] for row in range(rank, SAMPLES, 2)]
    return refusal(folder, DataLoader(rows, batch_size=BATCH, collate_fn=collate))


def test_data_that_differ_between_ranks_are_refused_on_all_of_them(tmp_path: Path):
    for told in run_distributed(shard_of_each_rank, 2, tmp_path):
        assert told.startswith("DataLoader: batches differ between processes")


def test_what_needs_single_rows_says_so(tmp_path: Path):
    config = tk.RunConfig(run_dir=tmp_path, tracker="none", cpu=True, batch_size=BATCH)
    with tk.start_run("loaders", config) as run:
        data = {"train": loader("shuffled"), "test": loader("stream")}
        trainer = standard_trainer(run, tk.Classification(), nn.Linear(4, 3), **data)
        with pytest.raises(UserError, match=r"replay cannot read a DataLoader. Give a tk\.TensorTable"):
            _ = trainer.batches.order


def test_a_run_is_not_continued_on_a_loader_of_another_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rows = iter([SAMPLES, SAMPLES - 1])

    def shrinking(kind: str) -> DataLoader[Any]:
        points = Points() if kind == "stream" else Subset(Points(), range(next(rows)))
        return DataLoader(points, batch_size=BATCH, collate_fn=collate)

    monkeypatch.setitem(train.__globals__, "loader", shrinking)
    with pytest.raises(UserError, match=r"started with train data of 46 rows, not of 45 rows. Give the dataset"):
        train(tmp_path / "run", "shrinking", stop_at=3)


@pytest.mark.parametrize("kind", ["shuffled", "stream"])
def test_evaluations_come_every_few_steps_also_where_nobody_knows_an_epoch(tmp_path: Path, kind: str):
    every = 4 / (STEPS_PER_EPOCH if kind == "shuffled" else 14)
    lines, _ = train(tmp_path, kind, epochs=3, eval_every=every, max_steps=14)
    assert [line["step"] for line in lines if "eval/loss" in line] == [4, 8, 12, 14]
