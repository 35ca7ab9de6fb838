"""Methods of an `Accelerator` that would train sharded experts wrongly, replaced."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any
from weakref import ref

from accelerate import Accelerator
from torch import Tensor

from toolkit.errors import UserError
from toolkit.experts.parallel.sync import ExpertSync
from toolkit.integrations.accelerate.patches import Patches


def replace_training_methods(accelerator: Accelerator, sync: ExpertSync, patches: Patches) -> None:
    """Have `accelerator` average gradients before it clips, by the norm of all ranks' experts, and raise for uneven
    batches.

    An accelerator may outlive its models: it must not keep `sync` in memory.
    """
    mine = ref(sync)

    def clip(parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2) -> Tensor | None:
        """Return the norm; None before the last micro-batch of a step, when nothing is clipped."""
        found = mine()
        if found is None:
            return clip_by_accelerate(parameters, max_norm, norm_type)
        if norm_type != 2:
            raise UserError(f"norm_type: {norm_type} is not supported for experts on several ranks. Use 2.")
        if not accelerator.sync_gradients:
            return None
        accelerator.unscale_gradients()
        return found.clip([parameters] if isinstance(parameters, Tensor) else parameters, max_norm)

    def unscale(optimizer: Any = None) -> None:
        # Every method that clips calls it, and so the averaging of each model with this accelerator.
        unscale_by_accelerate(optimizer)
        if (found := mine()) is not None and accelerator.sync_gradients:
            found.before_clip()

    def join_uneven_inputs(joinables: list[Any], even_batches: bool | None = None) -> AbstractContextManager[None]:
        even = accelerator.even_batches if even_batches is None else even_batches
        if mine() and not even and accelerator.num_processes > 1:
            raise UserError(
                "even_batches: False waits for ever, because each forward pass needs all ranks' experts. "
                "Train with even_batches=True, and evaluate in ExpertParallel's join()."
            )
        return join_by_accelerate(joinables, even_batches)

    clip_by_accelerate = patches.replace(accelerator, "clip_grad_norm_", clip)
    unscale_by_accelerate = patches.replace(accelerator, "unscale_gradients", unscale)
    join_by_accelerate = patches.replace(accelerator, "join_uneven_inputs", join_uneven_inputs)
