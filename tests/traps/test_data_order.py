"""What Accelerate's loaders do on resuming, on more processes, and on uneven data; and what ours do."""

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support.helpers import run_distributed
from toolkit.data.batches import EvalBatches, TrainBatches
from toolkit.data.table import TensorTable

SAMPLES = 64


def plain_loader(accelerator: Accelerator, *, batch_size: int = 2, samples: int = SAMPLES, shuffle: bool = True) -> Any:
    return accelerator.prepare(DataLoader(TensorDataset(torch.arange(samples)), batch_size=batch_size, shuffle=shuffle))


def rows_of(batches: Any) -> list[list[int]]:
    return [batch[0].tolist() for batch in batches]


def resume_plain_accelerate(folder: Path, seedable: bool) -> tuple[int, int]:
    """(matching, all) later batches after a stop at batch 3 of the second epoch."""
    configuration = DataLoaderConfiguration(use_seedable_sampler=seedable)
    set_seed(0)
    first = Accelerator(dataloader_config=configuration)
    loader, model = plain_loader(first), first.prepare(nn.Linear(1, 1))
    assert model is not None
    rows_of(loader)
    uninterrupted = []
    for index, batch in enumerate(loader):
        uninterrupted.append(batch[0].tolist())
        if index == 2:
            first.save_state(str(folder))

    set_seed(0)
    second = Accelerator(dataloader_config=configuration)
    loader, model = plain_loader(second), second.prepare(nn.Linear(1, 1))
    dist.barrier()
    second.load_state(str(folder))
    resumed = rows_of(second.skip_first_batches(loader, 3))
    expected = uninterrupted[3:]
    assert len(resumed) == len(expected)
    return sum(a == b for a, b in zip(resumed, expected, strict=True)), len(expected)


def train_batches(rank: int, world_size: int, num_workers: int = 0, accumulation: int = 1) -> TrainBatches:
    return TrainBatches(
        TensorTable(row=torch.arange(SAMPLES + 5)),
        batch_size=8,
        seed=0,
        rank=rank,
        world_size=world_size,
        num_workers=num_workers,
        accumulation=accumulation,
    )


def global_batches(start_step: int, steps: int, world_size: int, **options: int) -> list[list[int]]:
    """The rows of each step over all ranks, micro-batch by micro-batch."""
    iterators = [train_batches(rank, world_size, **options).steps(start_step) for rank in range(world_size)]
    found = []
    for _ in range(steps):
        ranks = [next(iterator) for iterator in iterators]
        found.append([row for pieces in zip(*ranks, strict=True) for piece in pieces for row in piece["row"].tolist()])
    return found


@pytest.mark.parametrize("seedable", [False, True], ids=["default sampler", "seedable sampler"])
def test_fact_1_accelerate_resumes_an_epoch_with_other_batches_and_ours_with_the_same(tmp_path: Path, seedable: bool):
    for matching, total in run_distributed(resume_plain_accelerate, 2, tmp_path / "state", seedable):
        assert total == 13
        assert matching == 0

    uninterrupted = global_batches(0, 27, 2)
    for step in (1, 8, 9, 12, 26):
        assert global_batches(step, 27 - step, 2) == uninterrupted[step:]


@pytest.mark.parametrize(
    ("world_size", "options"),
    [(1, {}), (4, {}), (2, {"num_workers": 2}), (2, {"accumulation": 2})],
    ids=["1 rank", "4 ranks", "2 loader workers", "2 micro-batches"],
)
def test_fact_2_our_global_batches_are_the_same_when_resumed_in_another_layout(
    world_size: int, options: dict[str, int]
):
    uninterrupted = global_batches(0, 27, 2)
    assert global_batches(12, 15, world_size, **options) == uninterrupted[12:]
    assert sorted(chain(*uninterrupted[:9])) == list(range(SAMPLES + 5)), (
        "each sample once an epoch, the short last batch included"
    )


def samples_in_the_first_step() -> list[int]:
    return rows_of(plain_loader(Accelerator(), batch_size=8, shuffle=False))[0]


def test_accelerates_global_batch_grows_with_the_processes_and_ours_does_not():
    plain = {world: sum(len(rows) for rows in run_distributed(samples_in_the_first_step, world)) for world in (1, 2)}
    assert plain == {1: 8, 2: 16}
    ours = [global_batches(0, 9, world) for world in (1, 2, 4)]
    assert ours[0] == ours[1] == ours[2]
    assert len(ours[0][0]) == 8


def plain_evaluation(even_batches: bool) -> list[list[int]]:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(even_batches=even_batches))
    return rows_of(plain_loader(accelerator, samples=5, shuffle=False))


def test_uneven_evaluation_data_is_repeated_or_divided_unevenly_and_ours_is_neither():
    repeated = run_distributed(plain_evaluation, 2, True)
    assert [len(batches) for batches in repeated] == [2, 2]
    assert len([row for batches in repeated for rows in batches for row in rows]) == 8, "of five samples"
    uneven = run_distributed(plain_evaluation, 2, False)
    assert [len(batches) for batches in uneven] == [2, 1], "a forward pass that is a collective would wait for ever"

    for world_size in (1, 2, 4):
        table = TensorTable(row=torch.arange(5))
        ranks = [list(EvalBatches(table, batch_size=4, rank=r, world_size=world_size)) for r in range(world_size)]
        assert {len(batches) for batches in ranks} == {2}
        rows: list[Tensor] = [batch["row"] for batches in ranks for batch in batches]
        assert sorted(torch.cat(rows).tolist()) == [0, 1, 2, 3, 4]
