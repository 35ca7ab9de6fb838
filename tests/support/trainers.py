"""A trainer as a recipe makes it, with the usual optimizer."""

from __future__ import annotations

from typing import Any

from torch import nn

import toolkit as tk
from toolkit.train.build import standard_trainer as with_optimizer


def standard_trainer(
    run: tk.Run, task: tk.Task, model: nn.Module, *, train: Any, test: Any, validation: Any = None, **settings: Any
) -> tk.Trainer:
    """Make a `toolkit.train.build.standard_trainer` with the config's optimizer."""
    data = tk.Splits(train, test, validation)
    return with_optimizer(run, task, model, tk.build_optimizer(model, run.config), data, **settings)
