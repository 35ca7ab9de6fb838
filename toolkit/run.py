"""A run: the machine (through Accelerate), the seed, the folder, and where metrics go."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin

from toolkit.config import RunConfig, require_divisible
from toolkit.errors import UserError
from toolkit.parallel import ShardGroups, make_shard_groups
from toolkit.seeding import derive_seed

T = TypeVar("T")


class Run:
    """What a recipe gets from `start_run` and hands to the trainer."""

    def __init__(self, name: str, config: RunConfig, accelerator: Accelerator):
        self.name, self.config, self.accelerator = name, config, accelerator
        self.started = time.time()

    @property
    def device(self) -> torch.device:
        return self.accelerator.device

    @property
    def rank(self) -> int:
        return self.accelerator.process_index

    @property
    def world_size(self) -> int:
        return self.accelerator.num_processes

    @property
    def is_main(self) -> bool:
        return self.accelerator.is_main_process

    @property
    def seed(self) -> int:
        return self.config.seed

    def agree(self, decide: Callable[[], T]) -> T:
        """Let the main process `decide`, and give its answer (or its UserError) to every rank."""
        answer: list[Any] = [None, None]
        if self.is_main:
            try:
                answer[0] = decide()
            except UserError as error:
                answer[1] = str(error)
        if dist.is_initialized():
            dist.broadcast_object_list(answer, src=0)
        if answer[1] is not None:
            raise UserError(answer[1])
        return answer[0]

    def log(self, values: dict[str, Any], step: int) -> None: ...
