"""Data traps: Accelerate's loaders after a resume, on several processes, and on uneven data.

`tests/data/test_batches.py` shows that the toolkit's batches do not depend on resumes and processes.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.support.processes import run_distributed


def loader(accelerator: Accelerator, *, batch_size: int = 2, samples: int = 64, shuffle: bool = True) -> Any:
    return accelerator.prepare(DataLoader(TensorDataset(torch.arange(samples)), batch_size=batch_size, shuffle=shuffle))


def rows_of(batches: Any) -> list[list[int]]:
    return [batch[0].tolist() for batch in batches]


def resume_epoch(folder: Path, seedable: bool) -> tuple[list[list[int]], list[list[int]]]:
    """Return the batches after the third one of the second epoch, without a stop and after a resume."""
    configuration = DataLoaderConfiguration(use_seedable_sampler=seedable)
    set_seed(0)
    accelerator = Accelerator(dataloader_config=configuration)
    batches, _ = loader(accelerator), accelerator.prepare(nn.Linear(1, 1))
    rows_of(batches)
    uninterrupted = []
    for index, batch in enumerate(batches):
        uninterrupted.append(batch[0].tolist())
        if index == 2:
            accelerator.save_state(str(folder))

    set_seed(0)
    accelerator = Accelerator(dataloader_config=configuration)
    batches, _ = loader(accelerator), accelerator.prepare(nn.Linear(1, 1))
    dist.barrier()
    accelerator.load_state(str(folder))
    return uninterrupted[3:], rows_of(accelerator.skip_first_batches(batches, 3))


@pytest.mark.parametrize("seedable", [False, True], ids=["default sampler", "seedable sampler"])
def test_resumed_epoch_has_different_batches(tmp_path: Path, seedable: bool):
    for uninterrupted, resumed in run_distributed(resume_epoch, 2, tmp_path / "state", seedable):
        assert len(resumed) == len(uninterrupted) == 13
        assert not any(found == expected for found, expected in zip(resumed, uninterrupted, strict=True))


def batches_by_setting() -> dict[str, list[list[int]]]:
    even, uneven = (
        Accelerator(dataloader_config=DataLoaderConfiguration(even_batches=even_batches))
        for even_batches in (True, False)
    )
    return {
        "batch of 8": rows_of(loader(even, batch_size=8, shuffle=False)),
        "even": rows_of(loader(even, samples=5, shuffle=False)),
        "uneven": rows_of(loader(uneven, samples=5, shuffle=False)),
    }


def test_global_batch_grows_with_processes_and_uneven_data_is_repeated_or_unequal():
    first, second = run_distributed(batches_by_setting, 2)
    assert len(first["batch of 8"][0] + second["batch of 8"][0]) == 16
    assert sum(map(len, first["even"] + second["even"])) == 8, "three of five samples are repeated"
    assert (len(first["uneven"]), len(second["uneven"])) == (2, 1), "a collective forward pass would hang"
