"""Trainers of recipes with the config's optimizer, callbacks from functions, preemption, and what a run learned."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import nn

import toolkit as tk
from toolkit.errors import Preempted
from toolkit.run.tracking.jsonl import read_metrics
from toolkit.train.build import standard_trainer as with_optimizer


def standard_trainer(
    run: tk.Run, task: tk.Task, model: nn.Module, *, train: Any, test: Any, validation: Any = None, **settings: Any
) -> tk.Trainer:
    data = tk.Splits(train, test, validation)
    return with_optimizer(run, task, model, tk.build_optimizer(model, run.config), data, **settings)


def fit(folder: Path, model: nn.Module, train: Any, test: Any = None, task: Any = None, **settings: Any) -> Any:
    """Train `model` in a run folder and return the results.

    `settings` are `callbacks`, `validation` and fields of `RunConfig`.
    """
    data = {"train": train, "test": train if test is None else test}
    data |= {name: settings.pop(name) for name in ("callbacks", "validation") if name in settings}
    with tk.start_run("toy", tk.RunConfig(run_dir=folder, tracker="none", cpu=True, **settings)) as run:
        return standard_trainer(run, task or tk.Classification(), model, **data).fit()


def in_hook(name: str, call: Callable[..., Any], step: int | None = None) -> tk.Callback:
    """Return a callback that calls `call(trainer, ...)` in the hook `name`: always, or only after `step` steps."""

    def hook(_: tk.Callback, trainer: tk.Trainer, *args: Any) -> None:
        if step in (None, trainer.state.step):
            call(trainer, *args)

    return type("InHook", (tk.Callback,), {name: hook})()


@contextmanager
def preempted_at(step: int) -> Iterator[None]:
    """Send SIGTERM to the run in the context after `step` steps, and expect `Preempted`."""
    train_step = tk.Trainer.train_step

    def preempted_step(self: tk.Trainer, micro_batches: Any) -> None:
        train_step(self, micro_batches)
        if self.state.step == step:
            os.kill(os.getpid(), signal.SIGTERM)

    with mock.patch.object(tk.Trainer, "train_step", preempted_step), pytest.raises(Preempted):
        yield


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the log steps of a run folder without measured times."""
    lines = read_metrics(folder / "metrics.jsonl")
    return [{name: value for name, value in line.items() if not name.startswith("perf/")} for line in lines]


def learned(folder: Path) -> tuple[list[dict[str, Any]], bytes]:
    """Return the metrics without restarts, and the tensors of the last checkpoint."""
    newest = sorted((folder / "checkpoints").glob("step-*"))[-1]
    lines = [line for line in metrics(folder) if "run/restarts" not in line]
    return lines, b"".join(path.read_bytes() for path in sorted(newest.glob("*.safetensors")))
