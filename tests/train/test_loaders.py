"""Training on a DataLoader and on datasets without a length."""

from collections.abc import Iterator
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
from benchmarks.support.precision import IN_FLOAT64, in_float64
from benchmarks.support.processes import run_distributed
from tests.support.trainers import fit, in_hook, metrics, standard_trainer
from toolkit.errors import UserError
from toolkit.run.config.callback_options import CheckpointOptions

SAMPLES, BATCH, STEPS_PER_EPOCH = 46, 8, 6
INPUTS, LABELS = torch.zeros(SAMPLES, 4), torch.arange(SAMPLES) % 3
NAMED = [{"input": row, "label": label} for row, label in zip(INPUTS, LABELS, strict=True)]


class Points(Dataset):
    """Points with new noise at each access."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        return torch.full((4,), row / SAMPLES) + 0.01 * torch.randn(4), row % 3


class Stream(IterableDataset):
    """The same points, without a length."""

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        points = Points()
        return (points[row] for row in range(SAMPLES))


class WrongLength(Stream):
    def __len__(self) -> int:
        return 70


class OnlyOnce(Stream):
    """A stream that is empty after one pass."""

    def __init__(self) -> None:
        self.points = super().__iter__()

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        return self.points


def collate(samples: list[tuple[Tensor, int]]) -> dict[str, Tensor]:
    inputs, labels = zip(*samples, strict=True)
    return {"input": torch.stack(inputs).to(torch.get_default_dtype()), "label": torch.tensor(labels)}


def unequal(_: Any) -> dict[str, Tensor]:
    return {"input": torch.zeros(3), "label": torch.zeros(2)}


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


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 3)


def with_dropout() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 3))


def interrupt(_: tk.Trainer) -> None:
    raise KeyboardInterrupt


def train(folder: Path, kind: str, stop_at: int | None = None, **settings: Any) -> tuple[list[dict[str, Any]], Any]:
    """Return metrics and results of a run that is interrupted at `stop_at` and resumed."""
    settings = {"max_steps": 15, "log_every": 1, "batch_size": BATCH} | settings
    with in_float64():
        if stop_at is not None:
            stop = in_hook("on_step_end", interrupt, stop_at)
            with pytest.raises(KeyboardInterrupt):
                fit(folder, with_dropout(), loader(kind), loader("stream"), callbacks=[stop], **settings)
        results = fit(folder, with_dropout(), loader(kind), loader("stream"), **settings)
    return metrics(folder), results


@pytest.mark.parametrize("kind", ["shuffled", "own generator", "batch sampler", "persistent workers", "stream"])
def test_resumed_run_equals_an_uninterrupted_run(tmp_path, kind):
    settings = {"epochs": 3, "checkpoint": CheckpointOptions(every_steps=4)}
    expected, results = train(tmp_path / "uninterrupted", kind, **settings)
    found, resumed = train(tmp_path / "resumed", kind, stop_at=9, **settings)
    assert len(expected) == 15
    assert found == expected
    # The sixth batch of an epoch is short; a stream has no epochs, so its passes are joined.
    assert results["samples"] == resumed["samples"] == 2 * SAMPLES + 3 * BATCH
    assert results["epochs"] == (1 if kind == "stream" else 15 / STEPS_PER_EPOCH)


def train_without_dropout(folder: Path, kind: str, settings: dict[str, Any]) -> tuple[list[dict[str, Any]], Any]:
    nn.Dropout.forward = lambda self, x: x  # type: ignore[method-assign]  # noqa: ARG005
    return train(folder, kind, **settings)


@pytest.mark.parametrize("kind", ["shuffled", "stream"])
def test_two_processes_equal_one_process(tmp_path, kind):
    settings: dict[str, Any] = {"gradient_accumulation_steps": 2, "epochs": 3, "max_steps": 7}
    ((expected, results),) = run_distributed(train_without_dropout, 1, tmp_path / "one", kind, settings)
    (found, two), (_, other) = run_distributed(train_without_dropout, 2, tmp_path / "two", kind, settings)
    assert two["samples"] == other["samples"] == results["samples"]
    for line, reference in zip(found, expected, strict=True):
        for loss in {"train/loss", "eval/loss"} & reference.keys():
            assert line[loss] == pytest.approx(reference[loss], rel=IN_FLOAT64)


@pytest.mark.parametrize(
    ("data", "settings", "message"),
    [
        (loader("shuffled"), {"batch_size": 16}, "batch_size=16: the DataLoader gives 8 samples"),
        (loader("stream"), {}, "max_steps=None: the training data have no length"),
        (DataLoader(WrongLength(), BATCH, collate_fn=collate), {"epochs": 2}, "ended after 6 batches, and its length"),
        (DataLoader(Points(), BATCH, sampler=DistributedSampler(Points(), 2, 0)), {}, "Leave it out: each process"),
        (DataLoader(Points(), BATCH, collate_fn=unequal), {}, r"columns have unequal rows \(input: 3, label: 2\)"),
        ([{"input": [0.0] * 4, "label": row % 3} for row in range(8)], {}, r"unequal rows \(input: 4, label: 8\)"),
        ([(torch.zeros(4), 0, 0)] * 8, {}, r"a batch is a list. Return samples as pairs \(input, label\) or"),
    ],
)
def test_fit_invalid_training_data_raise(tmp_path, data, settings, message):
    with pytest.raises(UserError, match=message):
        fit(tmp_path, linear(), data, loader("stream"), **{"batch_size": BATCH} | settings)


def test_fit_test_data_that_are_empty_after_one_pass_raise(tmp_path):
    test = DataLoader(OnlyOnce(), BATCH, collate_fn=collate)
    with pytest.raises(UserError, match="evaluate: 'eval' has no batches"):
        fit(tmp_path, linear(), loader("shuffled"), test, batch_size=BATCH, epochs=2)


@pytest.mark.parametrize("method", ["loss", "evaluate"])
@pytest.mark.parametrize("result", [torch.tensor(1.0), (torch.tensor(1.0), 8), {"loss": torch.tensor(1.0)}])
def test_fit_task_without_a_loss_object_raises(tmp_path, method, result):
    task: Any = tk.Classification()
    setattr(task, method, lambda _model, _batch: result)
    with pytest.raises(UserError, match=rf"^task\.{method}\b"):
        fit(tmp_path, linear(), loader("shuffled"), loader("stream"), task, batch_size=BATCH)


def fit_unequal_data(folder: Path) -> None:
    rows = [Points()[row] for row in range(torch.distributed.get_rank(), SAMPLES, 2)]
    with pytest.raises(UserError, match=r"^DataLoader: batches differ between processes"):
        fit(folder, linear(), DataLoader(rows, batch_size=BATCH, collate_fn=collate), batch_size=BATCH)


def test_fit_data_that_differ_between_ranks_raise_on_all_ranks(tmp_path):
    run_distributed(fit_unequal_data, 2, tmp_path)


@pytest.mark.parametrize(
    ("data", "samples"),
    [
        (TensorDataset(INPUTS, LABELS), NAMED),
        (DataLoader(TensorDataset(INPUTS, LABELS), BATCH), DataLoader(NAMED, BATCH)),  # type: ignore[arg-type]
    ],
    ids=["dataset", "loader"],
)
def test_pairs_equal_named_columns(tmp_path, data, samples):
    table = tk.TensorTable(input=INPUTS, label=LABELS)
    pairs = fit(tmp_path / "pairs", linear(), data, table, batch_size=BATCH)
    assert pairs["test_loss"] == fit(tmp_path / "named", linear(), samples, table, batch_size=BATCH)["test_loss"]


@pytest.mark.parametrize("kind", [tuple, lambda rows: dict(enumerate(rows))], ids=["tuple", "dict"])
def test_fit_samples_in_a_tuple_or_dict(tmp_path, kind):
    assert fit(tmp_path, linear(), kind(NAMED), batch_size=BATCH)["samples"] == SAMPLES


def test_order_of_a_loader_raises(tmp_path):
    with tk.start_run("loaders", tk.RunConfig(run_dir=tmp_path, tracker="none", cpu=True, batch_size=BATCH)) as run:
        data = {"train": loader("shuffled"), "test": loader("stream")}
        trainer = standard_trainer(run, tk.Classification(), nn.Linear(4, 3), **data)
        with pytest.raises(UserError, match=r"replay cannot read a DataLoader. Give a tk\.TensorTable"):
            _ = trainer.batches.order


def test_resume_with_a_loader_of_another_length_raises(tmp_path):
    first, second = (DataLoader(Subset(Points(), range(rows)), BATCH, collate_fn=collate) for rows in (46, 45))
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, linear(), first, batch_size=BATCH, callbacks=[in_hook("on_step_end", interrupt, 3)])
    with pytest.raises(UserError, match=r"started with train data of 46 rows, not of 45 rows. Give the dataset"):
        fit(tmp_path, linear(), second, batch_size=BATCH)


@pytest.mark.parametrize("kind", ["shuffled", "stream"])
def test_eval_every_counts_steps_also_without_epochs(tmp_path, kind):
    every = 4 / (STEPS_PER_EPOCH if kind == "shuffled" else 14)
    lines, _ = train(tmp_path, kind, epochs=3, eval_every=every, max_steps=14)
    assert [line["step"] for line in lines if "eval/loss" in line] == [4, 8, 12, 14]
