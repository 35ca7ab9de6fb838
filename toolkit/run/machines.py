"""Ranks that share the run folder: all ranks on a shared file system, else the ranks of one machine."""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path

from toolkit.errors import UserError
from toolkit.experts.parallel.collectives import gather_objects
from toolkit.experts.parallel.nodes import ranks_per_node
from toolkit.run.config.run import RunConfig

SEEN = ".ranks"


def folder_of_machine(folder: Path, config: RunConfig, rank: int, world_size: int) -> tuple[Path, list[int]]:
    """Return the folder of the run on this machine, and the ranks that share it. A collective.

    This is the main process's `folder`; on several machines, `run_dir` if given. Raises UserError on all ranks if some
    ranks do not share the folder and there is no storage.
    """
    if ranks_per_node(world_size) >= world_size:
        return folder, list(range(world_size))
    if config.run_dir is not None:
        folder = config.run_dir.resolve()
    ranks = ranks_that_share(folder, rank)
    if config.storage is None and max(gather_objects(len(ranks) < world_size)):
        raise UserError(f"run_dir={folder}: is not the same on all machines. Give a shared folder, or a storage.")
    return folder, ranks


def ranks_that_share(folder: Path, rank: int) -> list[int]:
    """Return the ranks that share `folder` with this one, in order. A collective.

    Each rank writes a file and lists the files of other ranks, because equal paths can be on different disks.
    """
    seen = folder / SEEN / gather_objects(uuid.uuid4().hex)[0]
    seen.mkdir(parents=True, exist_ok=True)
    (seen / str(rank)).touch()
    gather_objects(None)  # all files are written
    ranks = sorted(int(path.name) for path in seen.iterdir())
    gather_objects(None)  # all ranks have listed the files
    if rank == ranks[0]:
        shutil.rmtree(folder / SEEN, ignore_errors=True)
    return ranks
