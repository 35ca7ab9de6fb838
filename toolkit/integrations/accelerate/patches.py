"""Patches of other libraries' objects while experts are trained, and their removal.

- `accelerator_methods.py`: `clip_grad_norm_` (the norm of one rank's experts is not the model's), `unscale_gradients`
  (averages expert gradients before they are clipped) and `join_uneven_inputs` (raises for uneven batches) of an
  `Accelerator`;
- `saving.py`: `get_state_dict` (would have one rank's experts), `save_state` and `load_state` of an `Accelerator`;
- `Library.save_whole_model`: `save_pretrained`, `push_to_hub` and `load_adapter` of a model;
- `ExpertSync`: the steps of the optimizer, its state dict, and the gradients of experts;
- `expert_parallel.py`: `require_forward_param_sync` of `DistributedDataParallel` during `join`;
- `expert_trainer`: `prepare` of a Trainer's `Accelerator`, and `generate` of its model.

A sharded model stays sharded: the forward and hooks of its modules, and the wrapping by DDP and FSDP2, are not undone.
One step hook for all optimizers of a process stays, which raises for steps without gradient averaging.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any


class Patches(ExitStack):
    """LIFO undo stack for replaced attributes, undone by `close`."""

    def replace(self, target: Any, name: str, value: Any) -> Any:
        """Set attribute `name` of `target` to `value`, and return the old value."""
        original = getattr(target, name)
        if name in vars(target):
            self.callback(setattr, target, name, original)
        else:  # its class has it
            self.callback(delattr, target, name)
        setattr(target, name, value)
        return original
