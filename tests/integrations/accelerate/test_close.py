"""`close` restores the objects of other libraries that `ExpertParallel.prepare` patched and hooked."""

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
from tests.integrations.accelerate.toy import MIGRATING, Toy, ToyLoop, adamw, error_of, samples, sgd
from toolkit.errors import UserError
from toolkit.experts.state.state_dict import whole_state_dict
from toolkit.integrations.accelerate.expert_parallel import ExpertParallel
from toolkit.integrations.transformers.pretrained_files import save_pretrained


class SavableToy(Toy):
    """A toy with the methods of transformers' models that are patched."""

    def save_pretrained(self, folder: Any, *, state_dict: dict[str, Tensor] | None = None) -> None:
        torch.save(sorted(self.state_dict() if state_dict is None else state_dict), f"{folder}/names")

    def load_adapter(self) -> list[str]:
        return list(self.state_dict())


def patches_of(*targets: Any) -> dict[str, Any]:
    """Return functions and numbers of hooks of `targets`, and signal handlers.

    Forward hooks are left out: a model that stays sharded tells its layers which inputs are padding.
    """
    found: dict[str, Any] = {f"signal {each}": signal.getsignal(each) for each in signal.valid_signals()}
    for number, target in enumerate(targets):
        for name in {*vars(target), "_backward_hooks", "_post_accumulate_grad_hooks"}:
            value = getattr(target, name, None)
            if "_forward_" in name:
                continue
            if "hook" in name:
                found[f"{number} {name}"] = len(value) if isinstance(value, Sized) else 0
            elif callable(value) and not isinstance(value, nn.Module | type):
                found[f"{number} {name}"] = value
    return found


def train_and_close(folder: Any) -> None:
    accelerator, model = Accelerator(cpu=True), SavableToy()
    optimizer = adamw(model)
    targets = (accelerator, optimizer, model, model.head, *model.parameters())
    before = patches_of(*targets)
    loop = ToyLoop(lambda _: optimizer, model=model, accelerator=accelerator, replan=MIGRATING)
    experts = loop.experts
    with experts:
        loop.train(range(3), max_norm=1.0)
        model.save_pretrained(folder)
        assert model.load_adapter()
        during = patches_of(*targets)
        expected = model(samples())
    assert any(during[name] != before.get(name) for name in during)
    assert patches_of(*targets) == before
    assert torch.equal(model(samples()), expected)
    assert bool(whole_state_dict(model)) == accelerator.is_main_process
    save_pretrained(model, folder)
    if accelerator.num_processes > 1:
        incomplete = r"model.state_dict\(\): it would have the experts of this rank"
        for call in (lambda: model.save_pretrained(folder), lambda: accelerator.get_state_dict(loop.model)):
            with pytest.raises(UserError, match=incomplete):
                call()
        model(samples()).sum().backward()
        assert "or are closed" in error_of(optimizer.step)
    for call in (experts.metrics, lambda: experts.save(folder), lambda: experts.load(folder), experts.join().__enter__):
        assert "before prepare, or after close" in error_of(call)
    experts.close()
    other = ToyLoop(adamw, model=SavableToy(), accelerator=accelerator)
    other.train(range(3), max_norm=1.0)
    other.experts.close()
    assert patches_of(accelerator) == {name: value for name, value in before.items() if name[0] in "s0"}


@pytest.mark.parametrize("world", [1, 2])
def test_close_restores_methods_hooks_and_signals(world: int, tmp_path: Any) -> None:
    run_distributed(train_and_close, world, tmp_path)


def is_freed(closes: bool) -> bool:
    """Return whether a model and its parameters are freed while their accelerator stays, which still clips."""
    loop = ToyLoop(adamw, model=SavableToy(), replan=MIGRATING)
    loop.train(range(3), max_norm=1.0)
    accelerator, experts = loop.accelerator, loop.experts
    experts.metrics()
    references = [weakref.ref(loop.raw), *(weakref.ref(parameter) for parameter in loop.raw.parameters())]
    if closes:
        experts.close()
    else:
        del experts
    accelerator.free_memory()
    del loop
    gc.collect()
    if dist.is_initialized():
        dist.barrier()
    norm = accelerator.clip_grad_norm_([nn.Parameter(torch.ones(2))], 1.0)
    return all(reference() is None for reference in references) and bool(norm == 0)


@pytest.mark.parametrize("closes", [True, False])
@pytest.mark.parametrize("world", [1, 2])
def test_model_is_freed_while_its_accelerator_stays(world: int, closes: bool) -> None:
    assert run_distributed(is_freed, world, closes) == [True] * world


def test_error_in_the_loop_closes() -> None:
    accelerator, model = Accelerator(cpu=True), SavableToy()
    before = patches_of(accelerator, model)
    with pytest.raises(KeyError), ExpertParallel(accelerator) as experts:  # noqa: PT012
        experts.prepare(model, sgd(model))
        raise KeyError
    assert patches_of(accelerator, model) == before
