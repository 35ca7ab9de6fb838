"""A run that is told to stop after a step, as by a scheduler."""

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
    """The run in the `with` gets SIGTERM after `step` steps, and has to be preempted."""
    train_step = Trainer.train_step

    def stopping(self: Trainer, micro_batches: Any) -> None:
        train_step(self, micro_batches)
        if self.state.step == step:
            os.kill(os.getpid(), signal.SIGTERM)

    with mock.patch.object(Trainer, "train_step", stopping), pytest.raises(Preempted):
        yield
