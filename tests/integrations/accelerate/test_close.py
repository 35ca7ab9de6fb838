"""What `ExpertParallel.prepare` replaced and hooked of other libraries' objects is as it was after `close`."""

from __future__ import annotations

import gc
import signal
import weakref
from collections.abc import Sized
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn

from benchmarks.support.processes import run_distributed
from tests.integrations.accelerate.test_expert_parallel import MIGRATING, Model
from toolkit.errors import UserError
from toolkit.experts.state.state_dict import whole_state_dict
from toolkit.integrations.accelerate.expert_parallel import ExpertParallel
from toolkit.integrations.transformers.pretrained_files import save_pretrained


class Savable(Model):
    """As transformers' models."""

    def save_pretrained(self, folder: Any, *, state_dict: dict[str, Tensor] | None = None) -> None:
        torch.save(sorted(self.state_dict() if state_dict is None else state_dict), f"{folder}/names")

    def load_adapter(self) -> list[str]:
        return list(self.state_dict())


def changed(*targets: Any) -> dict[str, Any]:
    """What was put on `targets`, functions and hooks by their number, and the handlers of signals.

    Hooks of a module's forward are left out: a model that stays spread tells its layers what it was called with.
    """
    found: dict[str, Any] = {f"signal {each}": signal.getsignal(each) for each in signal.valid_signals()}
    for number, target in enumerate(targets):
        names = {*vars(target), "_backward_hooks", "_post_accumulate_grad_hooks"}
        for name in names:
            value = getattr(target, name, None)
            if "_forward_" in name:
                continue
            if "hook" in name:
                found[f"{number} {name}"] = len(value) if isinstance(value, Sized) else 0
            elif callable(value) and not isinstance(value, nn.Module | type):
                found[f"{number} {name}"] = value
    return found


def train(accelerator: Accelerator, model: Any, optimizer: Any, steps: int = 3) -> None:
    draws = torch.Generator().manual_seed(2)
    for _ in range(steps):
        loss = model(torch.randn(8, 5, generator=draws)).square().mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def prepare_and_close(folder: Any) -> bool:
    """Whether ranks had a part of the experts; asserts the rest."""
    accelerator = Accelerator(cpu=True)
    model: Any = Savable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    theirs = (accelerator, optimizer, model, model.head, *model.parameters())
    before = changed(*theirs)
    with ExpertParallel(accelerator, **MIGRATING) as experts:
        wrapped, its_optimizer = experts.prepare(model, optimizer)
        train(accelerator, wrapped, its_optimizer)
        model.save_pretrained(folder)
        assert model.load_adapter()
        during = changed(*theirs)
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(3))
        expected = model(x)
    assert {name for name in during if during[name] != before.get(name)}, "nothing was changed, so nothing was shown"
    assert changed(*theirs) == before
    assert torch.equal(model(x), expected)
    is_spread = accelerator.num_processes > 1
    assert bool(whole_state_dict(model)) == accelerator.is_main_process
    save_pretrained(model, folder)
    if is_spread:  # what would be silently wrong is refused by the modules themselves
        for call in (lambda: model.save_pretrained(folder), lambda: accelerator.get_state_dict(wrapped)):
            with pytest.raises(UserError, match=r"model.state_dict\(\): it would have the experts of this rank"):
                call()
        model(x).sum().backward()
        with pytest.raises(UserError, match="or are closed"):
            optimizer.step()
    calls = (experts.metrics, lambda: experts.save(folder), lambda: experts.load(folder), experts.join().__enter__)
    for call in calls:
        with pytest.raises(UserError, match="before prepare, or after close"):
            call()
    experts.close()
    again = ExpertParallel(accelerator)
    other: Any = Savable()
    train(accelerator, *again.prepare(other, torch.optim.AdamW(other.parameters())))
    again.close()
    assert changed(accelerator) == {name: value for name, value in before.items() if name[0] in "s0"}
    return is_spread


@pytest.mark.parametrize("world", [1, 2])
def test_close_restores_methods_hooks_and_signals(world: int, tmp_path: Any):
    assert run_distributed(prepare_and_close, world, tmp_path) == [world > 1] * world


def forgotten_models() -> bool:
    """Whether a model that was prepared and closed is still in memory while its accelerator and `experts` are."""
    accelerator = Accelerator(cpu=True)
    model: Any = Savable()
    optimizer = torch.optim.AdamW(model.parameters())
    experts = ExpertParallel(accelerator, **MIGRATING)
    train(accelerator, *experts.prepare(model, optimizer))
    experts.metrics()
    known = [weakref.ref(model), *(weakref.ref(parameter) for parameter in model.parameters())]
    experts.close()
    accelerator.free_memory()
    del model, optimizer
    gc.collect()
    if dist.is_initialized():
        dist.barrier()
    return any(reference() is not None for reference in known)


@pytest.mark.parametrize("world", [1, 2])
def test_close_frees_the_model(world: int):
    assert run_distributed(forgotten_models, world) == [False] * world


def test_error_in_the_loop_closes():
    accelerator = Accelerator(cpu=True)
    model = Savable()
    before = changed(accelerator, model)
    with pytest.raises(KeyError), ExpertParallel(accelerator) as experts:  # noqa: PT012
        experts.prepare(model, torch.optim.SGD(model.parameters()))
        raise KeyError
    assert changed(accelerator, model) == before
