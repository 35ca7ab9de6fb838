"""Batches of a user's DataLoader: every rank reads the global batch and takes its part.

The samples of a step therefore do not depend on the world size, and all ranks run the same number of steps. To resume,
the batches of the epoch before the step are read and skipped. Torch's CPU generator and the loader's own generator are
seeded by step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from toolkit.data.batches import EvalBatches, bounds
from toolkit.data.identity import Identity, identity_of_length
from toolkit.data.table import Batch
from toolkit.errors import UserError
from toolkit.experts.compat import new_iterator
from toolkit.experts.parallel.collectives import extremes_over_ranks
from toolkit.experts.parallel.seeding import derive_seed

NEEDS_TABLE = {"order", "table", "source", "micro_batches_of", "part_of"}
"""Attributes of `TrainBatches` that need access to single rows, which a DataLoader does not give."""


def make_loader(data: Any, *, batch_size: int, num_workers: int, shuffle: bool) -> DataLoader[Any]:
    """Return `data` if it is a DataLoader, else build one that reads the data set `data` in global batches.

    Raises:
        UserError: The DataLoader has a different batch size or a `DistributedSampler`.
    """
    if not isinstance(data, DataLoader):
        iterable = isinstance(data, IterableDataset) or not hasattr(data, "__getitem__")
        data = _Iterated(data) if iterable and not isinstance(data, IterableDataset) else data
        return DataLoader(data, batch_size, shuffle=shuffle and not iterable, num_workers=num_workers)
    if any(isinstance(each, DistributedSampler) for each in samplers_of(data)):
        raise UserError(
            "DataLoader: it has a DistributedSampler. Leave it out: each process takes its part of the global batch."
        )
    if data.batch_size not in (None, batch_size):
        raise UserError(
            f"batch_size={batch_size}: the DataLoader gives {data.batch_size} samples. Build it with "
            "batch_size=config.batch_size, which is the global batch."
        )
    return data


def known_length(data: Any) -> int | None:
    """Return the number of samples of a table or data set, or of batches of a DataLoader; None if it has no length."""
    try:
        return len(data)
    except TypeError:  # of a data set without a length
        return None


class _Iterated(IterableDataset[Any]):
    """Wrap an iterable that is not a torch data set."""

    def __init__(self, samples: Iterable[Any]):
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples)


class _OfLoader:
    """Batches of this rank, on its device, from a loader of global batches."""

    def __init__(self, loader: DataLoader[Any], seed: int, rank: int, world_size: int, device: torch.device | str):
        self.loader, self.seed, self.rank, self.world_size = loader, seed, rank, world_size
        self.device = torch.device(device)

    def identity(self) -> Identity | None:
        """Return the number of samples as a fingerprint, if it is known. Samples are not read."""
        sized = not isinstance(self.loader.dataset, IterableDataset)
        return identity_of_length(len(self.loader.dataset)) if sized else None  # type: ignore[arg-type]


class LoaderBatches(_OfLoader):
    """This rank's micro-batches of each step, on its device, from a loader of global batches.

    The loader restarts after `steps_per_epoch` batches. With `endless` it restarts when it is exhausted, and
    `steps_per_epoch` only defines the epochs reported elsewhere.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        steps_per_epoch: int,
        endless: bool = False,
        seed: int,
        accumulation: int = 1,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | str = "cpu",
    ):
        super().__init__(loader, seed, rank, world_size, device)
        self.steps_per_epoch, self.endless, self.accumulation = steps_per_epoch, endless, accumulation
        self._size = 0
        """Number of samples in the last global batch."""

    def samples_of(self, step: int) -> int:  # noqa: ARG002
        """Return the number of samples in the global batch of `step`, which is the last step that `steps` yielded."""
        return self._size

    def rows_of(self, step: int) -> list[int]:  # noqa: ARG002
        """Return an empty list, because the samples of a DataLoader have no row numbers."""
        return []

    def steps(self, start_step: int) -> Iterator[list[Batch]]:
        """Yield lists of this rank's micro-batches from `start_step` on, without end.

        Raises:
            UserError: The loader ends before its epoch does, its batches cannot be split over ranks, or they differ
                between ranks.
        """
        epoch = 0 if self.endless else start_step // self.steps_per_epoch
        step = epoch * self.steps_per_epoch
        compared = self.world_size == 1
        while True:
            first = step
            for batch in read_once(self.loader, self.seed, first, epoch):
                if step >= start_step:
                    self._size = size_of(batch)
                    if not compared:
                        refuse_unequal(batch, self.device)
                        compared = True
                    micro = [bounds(self._size, self.accumulation, part) for part in range(self.accumulation)]
                    yield [part_of_rank(batch, *rows, self.rank, self.world_size, self.device) for rows in micro]
                step += 1
                if not self.endless and step - first == self.steps_per_epoch:
                    break
            if step == first:
                raise UserError("train_data: it has no batches. Pass a dataset with samples, not a generator.")
            if not self.endless and step - first < self.steps_per_epoch:
                raise UserError(
                    f"DataLoader: it ended after {step - first} batches, and its length is {self.steps_per_epoch}. "
                    "Correct its __len__."
                )
            epoch += 1

    def empty(self) -> Batch:
        """Return a batch without samples."""
        return cut(next(read_once(self.loader, self.seed, 0, 0)), 0, 0, self.device)

    def __getattr__(self, name: str) -> Any:
        if name in NEEDS_TABLE:
            raise UserError("train_data: dynamic experts and replay cannot read a DataLoader. Give a tk.TensorTable.")
        raise AttributeError(name)


class LoaderEvalBatches(_OfLoader):
    """Global batches of a loader, split over ranks so that each sample is on exactly one rank."""

    def __iter__(self) -> Iterator[Batch]:
        for batch in read_once(self.loader, self.seed, 0, 0):
            yield part_of_rank(batch, 0, size_of(batch), self.rank, self.world_size, self.device)


AnyEvalBatches = EvalBatches | LoaderEvalBatches


def samplers_of(loader: DataLoader[Any]) -> tuple[Any, ...]:
    """Return all samplers that can have a generator or a `set_epoch`."""
    return loader.batch_sampler, loader.sampler, getattr(loader.batch_sampler, "sampler", None)


def read_once(loader: DataLoader[Any], seed: int, first_step: int, epoch: int) -> Iterator[Mapping[str, Any]]:
    """Iterate once over `loader`, starting at `first_step`, with random draws seeded by step."""
    samplers = samplers_of(loader)
    for part in (*samplers, loader.dataset):
        if (set_epoch := getattr(part, "set_epoch", None)) is not None:
            set_epoch(epoch)
    for part in (loader, *samplers):
        if (own := getattr(part, "generator", None)) is not None:
            own.manual_seed(derive_seed(seed, "loader", first_step))
    batches = None
    for step in count(first_step):
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(derive_seed(seed, "loader", step))
            batches = new_iterator(loader) if batches is None else batches
            batch = next(batches, None)
        if batch is None:
            return
        yield _named(batch)


def _named(batch: Any) -> Any:
    """Name the columns of a pair "input" and "label", as a `TensorDataset` and torchvision give them."""
    pair = isinstance(batch, (list, tuple)) and len(batch) == 2 and all(map(_has_rows, batch))
    return {"input": batch[0], "label": batch[1]} if pair else batch


def size_of(batch: Any) -> int:
    """Return the number of samples in `batch`. Raises UserError unless all columns have one row per sample."""
    if not isinstance(batch, Mapping) or not batch:
        raise UserError(
            f"DataLoader: a batch is a {type(batch).__name__}. Return samples as pairs (input, label) or dicts such as "
            '{"input": ..., "label": ...}, or batches from collate_fn.'
        )
    sizes = {name: len(value) if _has_rows(value) else type(value).__name__ for name, value in batch.items()}
    size = next(iter(sizes.values()))
    if not isinstance(size, int) or len(set(sizes.values())) > 1:
        told = ", ".join(f"{name}: {size}" for name, size in sizes.items())
        raise UserError(
            f"DataLoader: columns have unequal rows ({told}). Return tensors with one row per sample from collate_fn, "
            'or tensors as samples, such as by .with_format("torch") of a Hugging Face dataset.'
        )
    return size


def _has_rows(value: Any) -> bool:
    return value.ndim > 0 if isinstance(value, Tensor) else isinstance(value, (list, tuple))


def part_of_rank(
    batch: Mapping[str, Any], begin: int, end: int, rank: int, world_size: int, device: torch.device
) -> Batch:
    """Return the part of the samples `begin` to `end` that belongs to `rank`."""
    first, last = bounds(end - begin, world_size, rank)
    return cut(batch, begin + first, begin + last, device)


def cut(batch: Mapping[str, Any], begin: int, end: int, device: torch.device) -> Batch:
    """Copy the samples `begin` to `end` to `device`."""
    return send_to_device({name: value[begin:end] for name, value in batch.items()}, device, non_blocking=True)


def refuse_unequal(batch: Mapping[str, Any], device: torch.device) -> None:
    """Raise UserError on every rank if batches differ between ranks. A collective."""
    tensors = [value.detach().cpu().contiguous() for value in batch.values() if isinstance(value, Tensor)]
    content = hashlib.sha256()
    for tensor in tensors:
        content.update(repr(tuple(tensor.shape)).encode())
        content.update(tensor.view(torch.uint8).numpy().tobytes() if tensor.numel() and tensor.ndim else b"")
    digest = int.from_bytes(content.digest()[:7], "little")
    largest, smallest = extremes_over_ranks(torch.tensor(digest, device=device))
    if largest != smallest:
        raise UserError(
            "DataLoader: batches differ between processes. Give all of them the same data in the same order, "
            "unsharded: each takes its part of the global batch."
        )
