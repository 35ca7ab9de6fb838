"""What is changed of other libraries' objects where experts are trained: listed, and undone.

By `engine.py`:

- an `Accelerator`'s `clip_grad_norm_` (the norm of one rank's experts is not the model's) and `get_state_dict` (it
  would have the experts of one rank); `save_state` and `load_state`, which leave model and optimizers to
  `toolkit.experts.state`; and `join_uneven_inputs`, which is refused for uneven batches;
- `save_pretrained` and `push_to_hub` of a model's modules, which gather the experts of all ranks, and `load_adapter`,
  which may read names;
- the steps of an optimizer: gradients are averaged and replicas compared before, replicas refreshed and experts moved
  after each;
- gradients of experts, which are averaged in the backward over the ranks that have them;
- `require_forward_param_sync` of `DistributedDataParallel` in `join`: ranks with other numbers of forwards.

By `prepared_optimizer.py`: an optimizer's state dict, which says whose rows it has.

By `transformers/expert_trainer.py`: `prepare` of a Trainer's `Accelerator`, which spreads the experts, its model's
`generate`, and `_save` of the Trainer while a rank gives its experts to the one that writes.

What makes a model one whose experts are on several ranks is not undone, because their rows are there: the `forward` of
its experts modules (`spread.py`, `adapted_experts.py`, `peft/adapter_rows.py`), hooks of its modules (`route_hooks.py`,
`toolkit.experts.layer.model_inputs`), and what DDP and FSDP2 have made of the rest (`toolkit.experts.parallel`). One
hook for all optimizers of a process stays, too: it refuses steps of experts that nobody averages
(`prepared_optimizer.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol


class Removable(Protocol):
    """A hook that was registered, as torch's `RemovableHandle`."""

    def remove(self) -> None: ...


class Patches(ExitStack):
    """What takes back replaced attributes and hooks, the last one first, when it is closed."""

    def replace(self, target: Any, name: str, value: Any) -> Any:
        """Set the attribute `name` of `target` to `value`; returns what it was."""
        original = getattr(target, name)
        take_back: Callable[..., None] = setattr if name in vars(target) else _uncover
        self.callback(take_back, target, name, original)
        setattr(target, name, value)
        return original

    def keep(self, *hooks: Removable) -> None:
        """Have hooks that were registered removed."""
        for hook in hooks:
            self.callback(hook.remove)


def _uncover(target: Any, name: str, _original: Any) -> None:
    """Takes an attribute from `target` that its class has."""
    delattr(target, name)
