"""A trainer as a recipe makes it, with the usual optimizer."""

from __future__ import annotations

from typing import Any

from torch import nn

import toolkit as tk


def standard_trainer(run: tk.Run, task: tk.Task, model: nn.Module, **settings: Any) -> tk.Trainer:
    """`tk.standard_trainer` with AdamW as the run's config says."""
    return tk.standard_trainer(run, task, model, tk.adamw(model, run.config), **settings)
