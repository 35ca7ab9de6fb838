"""Which ranks of a run see the same folder: all if the machines share it, else those of one machine."""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path

from toolkit.errors import UserError
from toolkit.experts.parallel.collectives import gather_objects
from toolkit.experts.parallel.nodes import ranks_per_node
from toolkit.run.config.run import RunConfig

SEEN = ".ranks"


def is_on_one_machine(world_size: int) -> bool:
    """Return whether the launcher started all ranks on this machine, as far as it says."""
    return ranks_per_node(world_size) >= world_size


def folder_of_machine(folder: Path, config: RunConfig, rank: int, world_size: int) -> tuple[Path, list[int]]:
    """Return the folder of the run on this machine, and the ranks that share it. A collective.

    That is `folder`, the main process's, or on several machines what `run_dir` is on this one. Raises UserError on all
    ranks if not all share it and there is no storage.
    """
    if is_on_one_machine(world_size):
        return folder, list(range(world_size))
    if config.run_dir is not None:
        folder = config.run_dir.resolve()
    ranks = ranks_that_share(folder, rank)
    if config.storage is None and max(gather_objects(len(ranks) < world_size)):
        raise UserError(f"run_dir={folder}: is not the same on all machines: give a shared folder, or a storage.")
    return folder, ranks


def ranks_that_share(folder: Path, rank: int) -> list[int]:
    """Return the ranks that share `folder` with this one, in order. A collective.

    Each leaves a file in its folder and looks which others are there: a path says nothing of the disk behind it.
    """
    mark = uuid.uuid4().hex if rank == 0 else ""
    mark = gather_objects(mark)[0]
    seen = folder / SEEN / mark
    seen.mkdir(parents=True, exist_ok=True)
    (seen / str(rank)).touch()
    gather_objects(None)  # all have left theirs
    ranks = sorted(int(path.name) for path in seen.iterdir())
    gather_objects(None)  # all have looked
    if rank == ranks[0]:
        shutil.rmtree(folder / SEEN, ignore_errors=True)
    return ranks
