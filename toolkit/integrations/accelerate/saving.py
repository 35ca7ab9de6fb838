"""Checkpoints of a model with sharded experts, also by the methods of its `Accelerator`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import ref

from accelerate import Accelerator
from torch import Tensor, nn

from toolkit.experts.parallel.collectives import is_main, world_size
from toolkit.experts.state import checkpoint_files
from toolkit.experts.state.state_dict import is_sharded, whole_state_dict
from toolkit.experts.training import ExpertTraining
from toolkit.integrations.accelerate.compat import (
    models_of,
    schedulers_of,
    steps_once_per_process,
    without_states,
)
from toolkit.integrations.accelerate.patches import Patches


def save(training: ExpertTraining, folder: Path | str, extra: dict[str, Any]) -> None:
    """Write a checkpoint of model, optimizers, placement, random states and `extra`. A collective."""
    state = {**training.state_dict(), "world_size": world_size(), "extra": extra}
    checkpoint_files.save(folder, training.model, training.optimizers, state)


def load(training: ExpertTraining, folder: Path | str, accelerator: Accelerator) -> dict[str, Any]:
    """Load a checkpoint and return its `extra`. A collective. Warn of a schedule that goes on with other rates."""
    state = checkpoint_files.load(folder, training.model, training.optimizers)
    training.load_state_dict(state)
    saved = state["world_size"]
    if saved != world_size() and is_main() and any(map(steps_once_per_process, schedulers_of(accelerator))):
        warnings.warn(
            f"scheduler: Accelerate steps it once per process, {world_size()} times per step instead of {saved}. "
            "Use Accelerator(step_scheduler_with_optimizer=False) or split_batches for the same rates.",
            stacklevel=2,
        )
    extra: dict[str, Any] = state["extra"]
    return extra


def replace_saving_methods(accelerator: Accelerator, training: ExpertTraining, patches: Patches) -> None:
    """Have `get_state_dict`, `save_state` and `load_state` of `accelerator` save and load all ranks' experts.

    An accelerator may outlive its models: it must not keep `training` in memory.
    """
    mine = ref(training)
    name = f"experts_{next(number for number, model in enumerate(models_of(accelerator)) if _is_in(model, training))}"

    def get_state_dict(model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """Return a sharded model's full state on rank 0, else {}. A collective. `save_model` calls it."""
        inner = accelerator.unwrap_model(model) if unwrap else model
        return whole_state_dict(inner) if is_sharded(inner) else originals["get_state_dict"](model, unwrap)

    def save_state(*args: Any, **kwargs: Any) -> Any:
        return run("save_state", lambda found, folder: save(found, folder, {}), *args, **kwargs)

    def load_state(*args: Any, **kwargs: Any) -> Any:
        return run("load_state", lambda found, folder: load(found, folder, accelerator), *args, **kwargs)

    def run(called: str, add: Callable[[ExpertTraining, Path], Any], *args: Any, **kwargs: Any) -> Any:
        """Call Accelerate's method for all but the model and its optimizers, and `add` for these."""
        found = mine()
        if found is None or not any(_is_in(model, found) for model in models_of(accelerator)):  # after `free_memory`
            return originals[called](*args, **kwargs)
        hook = getattr(accelerator, f"register_{called}_pre_hook")(lambda *at: add(found, Path(at[-1]) / name))
        try:
            with without_states(accelerator, found.model, found.prepared, *found.optimizers):
                return originals[called](*args, **kwargs)
        finally:
            hook.remove()

    replaced = {"get_state_dict": get_state_dict, "save_state": save_state, "load_state": load_state}
    originals = {method: patches.replace(accelerator, method, ours) for method, ours in replaced.items()}


def _is_in(model: nn.Module, training: ExpertTraining) -> bool:
    """Whether `model` is the model of `training`, which Accelerate keeps inside or outside of DDP."""
    return model is training.model or model is training.prepared
