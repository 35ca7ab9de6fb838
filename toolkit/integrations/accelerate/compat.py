"""Private names of Accelerate that the toolkit relies on, each behind one function.

`tests/test_compat.py` tests the behaviour that each function relies on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import nn

from toolkit.integrations.accelerate.patches import Patches

if TYPE_CHECKING:
    from accelerate import Accelerator


def _know_fsdp2_on_cpus(initialize: Callable[..., None]) -> Callable[..., None]:
    """Have an `AcceleratorState` shard on CPU processes as on GPUs.

    Accelerate 1.15 drops the plugin there without a warning, and trains with DDP.
    """

    @functools.wraps(initialize)
    def initialize_with_fsdp2(
        state: AcceleratorState,
        *args: Any,
        fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
        **kwargs: Any,
    ) -> None:
        initialize(state, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and state.distributed_type == DistributedType.MULTI_CPU:
            if state.mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(state.mixed_precision)
            state.fsdp_plugin = fsdp_plugin
            state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    return initialize_with_fsdp2


AcceleratorState.__init__ = _know_fsdp2_on_cpus(AcceleratorState.__init__)


def is_marked_as_prepared(model: nn.Module) -> bool:
    """Whether `Accelerator.prepare` would return `model` as it is."""
    return getattr(model, "_is_accelerate_prepared", False)


def steps_once_per_process(scheduler: object) -> bool:
    """Whether Accelerate has prepared `scheduler`, whose `step` then makes a step for each process."""
    return isinstance(scheduler, AcceleratedScheduler) and scheduler.step_with_optimizer and not scheduler.split_batches


def schedulers_of(accelerator: Accelerator) -> list[AcceleratedScheduler]:
    """Return prepared schedulers of `accelerator`."""
    return accelerator._schedulers


def models_of(accelerator: Accelerator) -> list[nn.Module]:
    """Return the prepared models of `accelerator`, in order, without DDP; `save_state` writes these."""
    return accelerator._models


@contextmanager
def without_states(accelerator: Accelerator, *objects: Any) -> Iterator[None]:
    """Have `save_state` and `load_state` skip `objects`: models, as returned by `models_of`, and unwrapped
    optimizers."""
    left_out = {id(each) for each in objects}
    optimizers = [each for each in accelerator._optimizers if id(each.optimizer) not in left_out]
    with Patches() as meanwhile:
        meanwhile.replace(accelerator, "_models", [each for each in accelerator._models if id(each) not in left_out])
        meanwhile.replace(accelerator, "_optimizers", optimizers)
        yield


def undo_prepare_for_evaluation(model: nn.Module) -> None:
    """Undo `Accelerator.prepare_model(model, evaluation_mode=True)`, which wraps in no DDP: the mark and autocast."""
    vars(model).pop("_is_accelerate_prepared", None)
    forward = vars(model).pop("_original_forward", None)
    if forward is not None:
        model.forward = forward


def reset_accelerator_state() -> None:
    """Clear Accelerate's process-wide state, so that the next Accelerator can choose another device or precision."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
