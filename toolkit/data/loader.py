"""Batches of a DataLoader of one's own: every rank reads the whole global batch and takes its part.

So what one step learns from does not depend on the number of ranks, and all ranks have as many steps. A run resumes by
reading again what it has seen of the epoch, without training on it; what the loader draws from torch's generator on the
CPU, or from its own, is a function of the step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
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
from toolkit.experts.parallel.groups import extremes_over_ranks
from toolkit.experts.parallel.seeding import derive_seed

NEEDS_TABLE = {"order", "table", "source", "micro_batches_of", "part_of", "seen"}
"""What `TrainBatches` has beyond `LoaderBatches`: access to single rows."""


def make_loader(data: Any, *, batch_size: int, num_workers: int, shuffle: bool) -> DataLoader[Any]:
    """`data` itself where it is a DataLoader, else one that reads the data set `data` in global batches.

    Raises UserError for a DataLoader of another batch size, or with a `DistributedSampler`.
    """
    if not isinstance(data, DataLoader):
        iterable = isinstance(data, IterableDataset) or not hasattr(data, "__getitem__")
        data = _Iterated(data) if iterable and not isinstance(data, IterableDataset) else data
        return DataLoader(data, batch_size, shuffle=shuffle and not iterable, num_workers=num_workers)
    if any(isinstance(each, DistributedSampler) for each in samplers_of(data)):
        raise UserError("the DataLoader has a DistributedSampler: leave it out, each process takes its part by itself.")
    if data.batch_size not in (None, batch_size):
        raise UserError(
            f"batch_size={batch_size}: the DataLoader gives {data.batch_size} samples: build it with "
            "batch_size=config.batch_size, which is the global batch."
        )
    return data


def known_length(data: Any) -> int | None:
    """The number of samples of a table or data set, or of batches of a DataLoader; None where nobody knows."""
    try:
        return len(data)
    except TypeError:  # of a data set without a length
        return None


class _Iterated(IterableDataset[Any]):
    """An iterable that is no data set of torch's."""

    def __init__(self, samples: Iterable[Any]):
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples)


class LoaderBatches:
    """This rank's micro-batches of each step, on its device, from a loader of global batches.

    `steps_per_epoch`: batches after which the loader begins anew. With `endless` it begins anew where it ends, and
    `steps_per_epoch` is only what counts as an epoch elsewhere.
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
        self.loader, self.steps_per_epoch, self.endless, self.seed = loader, steps_per_epoch, endless, seed
        self.accumulation, self.rank, self.world_size = accumulation, rank, world_size
        self.device = torch.device(device)
        self._size = 0
        """Samples of the global batch that was read last."""

    def samples_of(self, step: int) -> int:  # noqa: ARG002
        """Samples of the global batch of `step`, the one that `steps` gave last."""
        return self._size

    def rows_of(self, step: int) -> list[int]:  # noqa: ARG002
        """Empty: what a loader read has no numbers."""
        return []

    def steps(self, start_step: int) -> Iterator[list[Batch]]:
        """Lists of this rank's micro-batches, from `start_step` on, without end.

        Raises UserError where the loader ends before its epoch does, gives what can't be cut into ranks, or gives other
        batches on another rank.
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
                    yield [self._part(batch, micro) for micro in range(self.accumulation)]
                step += 1
                if not self.endless and step - first == self.steps_per_epoch:
                    break
            if step == first:
                raise UserError("the training data give no batches: pass a data set with samples, not a generator.")
            if not self.endless and step - first < self.steps_per_epoch:
                raise UserError(
                    f"the training data ended after {step - first} of {self.steps_per_epoch} steps, the length of the "
                    "DataLoader: mend its __len__."
                )
            epoch += 1

    def identity(self) -> Identity | None:
        """The number of samples, where it is known; the samples are not read."""
        return identity_of_loader(self.loader)

    def empty(self) -> Batch:
        """A batch without samples."""
        return cut(next(read_once(self.loader, self.seed, 0, 0)), 0, 0, self.device)

    def _part(self, batch: Mapping[str, Any], micro: int) -> Batch:
        begin, end = bounds(size_of(batch), self.accumulation, micro)
        return part_of_rank(batch, begin, end, self.rank, self.world_size, self.device)

    def __getattr__(self, name: str) -> Any:
        if name in NEEDS_TABLE:
            raise UserError("dynamic experts and replay need training data in a tk.TensorTable, not a DataLoader.")
        raise AttributeError(name)


class LoaderEvalBatches:
    """The global batches of a loader, cut into ranks, so that each sample is on exactly one."""

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        seed: int,
        rank: int,
        world_size: int,
        device: torch.device | str = "cpu",
    ):
        self.loader, self.seed, self.rank, self.world_size = loader, seed, rank, world_size
        self.device = torch.device(device)

    def identity(self) -> Identity | None:
        """The number of samples, where it is known; the samples are not read."""
        return identity_of_loader(self.loader)

    def __iter__(self) -> Iterator[Batch]:
        for batch in read_once(self.loader, self.seed, 0, 0):
            size = size_of(batch)
            yield part_of_rank(batch, 0, size, self.rank, self.world_size, self.device)


AnyEvalBatches = EvalBatches | LoaderEvalBatches


def identity_of_loader(loader: DataLoader[Any]) -> Identity | None:
    sized = not isinstance(loader.dataset, IterableDataset)
    return identity_of_length(len(loader.dataset)) if sized else None  # type: ignore[arg-type]


def samplers_of(loader: DataLoader[Any]) -> tuple[Any, ...]:
    """The samplers that may draw or be told the epoch: of batches, and the one of samples in it."""
    return loader.batch_sampler, loader.sampler, getattr(loader.batch_sampler, "sampler", None)


def read_once(loader: DataLoader[Any], seed: int, first_step: int, epoch: int) -> Iterator[Mapping[str, Any]]:
    """One pass over `loader`, whose batches are those of `first_step` and after; random draws are seeded by step."""
    samplers = samplers_of(loader)
    for part in (*samplers, loader.dataset):
        if (set_epoch := getattr(part, "set_epoch", None)) is not None:
            set_epoch(epoch)
    for part in (loader, *samplers):
        if (own := getattr(part, "generator", None)) is not None:
            own.manual_seed(derive_seed(seed, "loader", first_step))
    batches = None
    for step in count(first_step):
        with _seeded(seed, "loader", step):
            batches = new_iterator(loader) if batches is None else batches
            batch = next(batches, None)
        if batch is None:
            return
        yield _named(batch)


def _named(batch: Any) -> Any:
    """A pair, as of a `TensorDataset` or of torchvision, becomes the columns "input" and "label"."""
    pair = isinstance(batch, (list, tuple)) and len(batch) == 2 and all(map(_has_rows, batch))
    return {"input": batch[0], "label": batch[1]} if pair else batch


@contextmanager
def _seeded(*address: int | str) -> Iterator[None]:
    state = torch.default_generator.get_state()
    torch.default_generator.manual_seed(derive_seed(*address))
    try:
        yield
    finally:
        torch.default_generator.set_state(state)


def size_of(batch: Any) -> int:
    """Samples in a batch. Raises UserError unless it is a mapping of values with one row per sample."""
    if not isinstance(batch, Mapping) or not batch:
        raise UserError(
            f"a batch is a {type(batch).__name__}: let samples be pairs (input, label) or dicts, such as "
            '{"input": ..., "label": ...}, or the collate_fn of the DataLoader return such.'
        )
    sizes = {name: len(value) if _has_rows(value) else type(value).__name__ for name, value in batch.items()}
    size = next(iter(sizes.values()))
    if not isinstance(size, int) or len(set(sizes.values())) > 1:
        told = ", ".join(f"{name}: {size}" for name, size in sizes.items())
        raise UserError(
            f"the DataLoader gives columns of unequal rows ({told}): let its collate_fn return tensors with one row "
            'per sample, or samples hold tensors, as .with_format("torch") has a data set of Hugging Face do.'
        )
    return size


def _has_rows(value: Any) -> bool:
    return value.ndim > 0 if isinstance(value, Tensor) else isinstance(value, (list, tuple))


def part_of_rank(
    batch: Mapping[str, Any], begin: int, end: int, rank: int, world_size: int, device: torch.device
) -> Batch:
    """The part of the samples `begin` to `end` that `rank` takes."""
    first, last = bounds(end - begin, world_size, rank)
    return cut(batch, begin + first, begin + last, device)


def cut(batch: Mapping[str, Any], begin: int, end: int, device: torch.device) -> Batch:
    """The samples `begin` to `end`, on `device`."""
    return send_to_device({name: value[begin:end] for name, value in batch.items()}, device, non_blocking=True)


def refuse_unequal(batch: Mapping[str, Any], device: torch.device) -> None:
    """Raise UserError on every rank where ranks have other batches. A collective."""
    tensors = [value.detach().cpu().contiguous() for value in batch.values() if isinstance(value, Tensor)]
    content = hashlib.sha256()
    for tensor in tensors:
        content.update(repr(tuple(tensor.shape)).encode())
        content.update(tensor.view(torch.uint8).numpy().tobytes() if tensor.numel() and tensor.ndim else b"")
    digest = int.from_bytes(content.digest()[:7], "little")
    largest, smallest = extremes_over_ranks(torch.tensor(digest, device=device))
    if largest != smallest:
        raise UserError(
            "the DataLoader gives other batches on another process: give all of them the same data in the same order, "
            "unsharded; each takes its part of the global batch by itself."
        )
