"""Methods of an `Accelerator` that would save or load one rank's experts, replaced."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import ref

from torch import Tensor, nn

from toolkit.experts.state.state_dict import is_sharded, whole_state_dict
from toolkit.integrations.accelerate.compat import models_of, without_states

if TYPE_CHECKING:
    from toolkit.integrations.accelerate.expert_parallel import ExpertParallel


def replace_saving_methods(experts: ExpertParallel) -> None:
    """Have `get_state_dict`, `save_state` and `load_state` of its accelerator save and load all ranks' experts.

    An accelerator may outlive its models: it must not keep `experts` in memory.
    """
    mine, accelerator, patches = ref(experts), experts.accelerator, experts.patches
    name = f"experts_{next(number for number, model in enumerate(models_of(accelerator)) if _is_in(model, experts))}"

    def get_state_dict(model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """Return a sharded model's full state on rank 0, else {}. A collective. `save_model` calls it."""
        inner = accelerator.unwrap_model(model) if unwrap else model
        return whole_state_dict(inner) if is_sharded(inner) else originals["get_state_dict"](model, unwrap)

    def run(called: str, *args: Any, **kwargs: Any) -> Any:
        """Call Accelerate's method for all but the model and its optimizers, and `save` or `load` for these."""
        found = mine()
        if found is None or not any(_is_in(model, found) for model in models_of(accelerator)):  # after `free_memory`
            return originals[called](*args, **kwargs)
        add = found.save if called == "save_state" else found.load
        hook = getattr(accelerator, f"register_{called}_pre_hook")(lambda *at: add(Path(at[-1]) / name))
        try:
            with without_states(accelerator, *_models(found), *found.optimizers):
                return originals[called](*args, **kwargs)
        finally:
            hook.remove()

    replaced = {
        "get_state_dict": get_state_dict,
        "save_state": partial(run, "save_state"),
        "load_state": partial(run, "load_state"),
    }
    originals = {method: patches.replace(accelerator, method, ours) for method, ours in replaced.items()}


def _models(experts: ExpertParallel) -> tuple[nn.Module, ...]:
    """Return the model inside and outside of DDP: Accelerate keeps one of them."""
    return () if experts.sync is None else (experts.sync.model, experts.sync.prepared)


def _is_in(model: nn.Module, experts: ExpertParallel) -> bool:
    return any(model is each for each in _models(experts))
