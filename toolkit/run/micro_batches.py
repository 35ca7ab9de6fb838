"""Micro-batch size after a step ran out of memory, stored in the run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import PositiveInt

from toolkit.errors import reading
from toolkit.experts.options import Options

MICRO_BATCH_SIZE = "micro_batch_size.json"


class MicroBatches(Options, strict=True):
    """Micro-batches of a run on `world_size` ranks."""

    world_size: PositiveInt
    micro_batch_size: PositiveInt
    """Samples per rank."""
    out_of_memory_with: PositiveInt
    """The larger size with which a step ran out of memory."""

    @classmethod
    def read(cls, folder: Path, per_rank: int, world_size: int) -> Self | None:
        """Return the micro-batches stored in `folder` for `world_size` ranks, or None.

        Args:
            folder: The run's folder.
            per_rank: Samples per rank and step; must be a multiple of the size.
            world_size: The number of ranks. Only the same world size keeps the size, because seeds of forward passes
                depend on the micro-batch index.

        Raises:
            UserError: If the file is damaged.
        """
        path = folder / MICRO_BATCH_SIZE
        if not path.exists():
            return None
        with reading(path, "Delete it, and run the same command."):
            found = cls.model_validate_json(path.read_bytes())
            if found.world_size == world_size and per_rank % found.micro_batch_size:
                raise ValueError(f"{found.micro_batch_size} does not divide {per_rank}")
        return found if found.world_size == world_size else None
