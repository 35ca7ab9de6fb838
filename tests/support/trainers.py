"""Trainers of recipes with the config's optimizer, and callbacks from functions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

import toolkit as tk
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
