"""Preemption of a run after a given step."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest

from toolkit.errors import Preempted
from toolkit.train.trainer import Trainer


@contextmanager
def preempted_at(step: int) -> Iterator[None]:
    """Send SIGTERM to the run in the context after `step` steps, and expect `Preempted`."""
    train_step = Trainer.train_step

    def preempted_step(self: Trainer, micro_batches: Any) -> None:
        train_step(self, micro_batches)
        if self.state.step == step:
            os.kill(os.getpid(), signal.SIGTERM)

    with mock.patch.object(Trainer, "train_step", preempted_step), pytest.raises(Preempted):
        yield
