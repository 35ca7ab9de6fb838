"""Records one process of a script, without changes to the script.

All data come from hooks in torch and Accelerate, so any training loop works: `Accelerator.prepare` has the model,
`Accelerator.backward` the loss, clipping the norm, the optimizer's step hooks the gradients. The state after a step is
read when the next training forward pass begins, so that it includes all that follows a step. After the last step,
`Finished` ends the script.
"""

from __future__ import annotations

import functools
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from toolkit.doctor.record import (
    GIVEN,
    Phase,
    Record,
    Step,
    digest,
    is_spread_by_others,
    plain,
    sample_digests,
)
from toolkit.experts.compat import without_compile_prefix
from toolkit.experts.layer.routing_log import Cursor
from toolkit.experts.parallel.ownership import is_owned, local_rows, ownership_of
from toolkit.experts.parallel.sync import ExpertSync

Variant = Literal["as it is", "perturbed", "stepped for each process"]
"""How a script runs: `perturbed` has weights that are perturbed before each step, the yardstick for rounding errors;
`stepped for each process` has `AcceleratedScheduler` make `num_processes` steps at a time."""
ROUNDING = 2e-7
"""Relative perturbation of weights that stands for rounding: twice float32's last bit."""


SPLIT_NOTE = "split_batches=True was set, so that every world sees the same global batches"


class Finished(BaseException):
    """Raised in the script when enough steps were recorded."""


class Hook(functools.partial[Any]):
    """A hook on a module. Copies of the module, deep or pickled, have hooks that do nothing."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Hook, (ignore,)


def ignore(*_: Any, **__: Any) -> None:
    """The hook of a copied module."""


class Recorder:
    """Watches the models that are prepared in this process for `steps` optimizer steps."""

    def __init__(self, out: Path, steps: int, variant: Variant = "as it is"):
        self.out, self.steps, self.variant = out, steps, variant
        self.record = Record()
        self.models: list[nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.syncs: list[ExpertSync] = []
        """Syncs that average gradients in an optimizer hook."""
        self.accelerator: Any = None
        self.save: Callable[[str], Any] | None = None
        self.load: Callable[[Any], Any] | None = None
        self.step = Step()
        self.in_backward = self.is_clipping = self.is_preparing = self.done = False
        self._cursors: dict[str, Cursor] = {}
        self._choices: dict[str, list[str]] = {}
        self._buffers: dict[str, str] = {}
        self._unclipped: dict[str, Tensor] | None = None
        self.script_splits = False
        """Whether the script sets `split_batches=True` itself."""
        self._open_step = True
        self._unreached = 0
        """Balance losses of this step that no backward pass reached."""
        self._has_gradients = False
        """Whether a backward pass has ended since any optimizer's last step."""

    def note(self, text: str) -> None:
        """Record a change to the script, once."""
        if text not in self.record.notes:
            self.record.notes.append(text)

    def _at(self, place: str, step: int) -> None:
        """Write this rank's position to a file, in case it hangs."""
        if self.record.world > 1:
            (self.out / f"place{self.record.rank}.txt").write_text(f"at step {step}, {place}")

    # --- names ------------------------------------------------------------------------------------------------

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for number, model in enumerate(self.models):
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    yield self._name(number, name), parameter

    @staticmethod
    def _name(number: int, name: str) -> str:
        return (f"model{number}." if number else "") + without_compile_prefix(name)

    # --- observations -----------------------------------------------------------------------------------------

    def prepare(self, accelerator: Any, models: list[nn.Module], prepare: Callable[[], Any]) -> Any:
        """Call Accelerate's `prepare` on models to record."""
        if self.is_preparing:
            return prepare()
        self.accelerator = accelerator
        self.record.rank, self.record.world = accelerator.process_index, accelerator.num_processes
        self.record.precision = accelerator.mixed_precision
        for model in models:
            if any(p.requires_grad for p in model.parameters()) and all(m is not model for m in self.models):
                self.models.append(model)
                self._listen(len(self.models) - 1, model)
        self.is_preparing = True
        try:
            return prepare()
        finally:
            self.is_preparing = False

    def _listen(self, number: int, model: nn.Module) -> None:
        # Before the hooks of FSDP2, which replace the optimizer's parameters by gathered ones.
        model.register_forward_pre_hook(Hook(self._before_forward), with_kwargs=True, prepend=True)
        model.register_forward_hook(Hook(self._after_forward))
        inside: tuple[str, ...] = ()
        for name, module in model.named_modules():
            called = self._name(number, name)
            router = getattr(module, "router", None)
            # Early in a layer's forward pass: recomputation in the backward pass can stop before its end.
            if isinstance(router, nn.Module) and hasattr(module, "expert_stack"):
                router.register_forward_hook(Hook(self._after_router, called))
            elif hasattr(module, "num_experts") or hasattr(module, "expert_stack"):
                module.register_forward_pre_hook(Hook(self._before_experts, called), with_kwargs=True)
            if name.startswith(inside):
                continue
            if hasattr(module, "num_experts") or hasattr(module, "expert_stack"):
                inside += (f"{name}.",)  # rows in there are in an order of their own
            module.register_forward_hook(Hook(self._after_module, called))

    def _before_forward(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if not (torch.is_grad_enabled() and model.training) or self.in_backward:
            return
        if self._open_step:
            self._begin_step()
        self._at("in a forward", len(self.record.steps) + 1)
        for name, buffer in model.named_buffers():
            if name in self._buffers and self._buffers[name] != digest(buffer):
                self.record.see("buffers of ranks", name)
        self.step.samples.append(sample_digests(model, args, kwargs))

    def before_wrapped_forward(self, *_: Any) -> None:
        """DDP broadcasts buffers between this call and `_before_forward`."""
        self._buffers = {name: digest(b) for model in self.models for name, b in model.named_buffers()}

    def _after_forward(self, model: nn.Module, _args: Any, output: Any) -> None:
        if torch.is_grad_enabled() and model.training and not self.in_backward:
            balance_loss = getattr(output, "aux_loss", None)
            if isinstance(balance_loss, Tensor):
                self.step.balance_losses.append(float(balance_loss.detach()))
                if balance_loss.requires_grad:
                    self._unreached += 1
                    balance_loss.register_hook(self._reach)

    def _reach(self, _gradient: Tensor) -> None:
        self._unreached -= 1

    def _after_module(self, name: str, module: nn.Module, _args: Any, output: Any) -> None:
        output = output[0] if isinstance(output, tuple) and output else getattr(output, "logits", output)
        if isinstance(output, Tensor) and output.is_floating_point():
            self._see_values(name, module, output)

    def _see_values(self, name: str, module: nn.Module, values: Tensor) -> None:
        """Record a fingerprint per sample, of the first values in a forward pass of the model."""
        if not (self.step.samples and module.training and torch.is_grad_enabled()) or self.in_backward:
            return
        samples = len(self.step.samples[-1])
        key = f"{len(self.record.steps)}/output/{len(self.step.samples) - 1}/{name}"
        if key in self.record.tensors or not values.ndim or (values.shape[0] % samples if samples else values.shape[0]):
            return
        rows = values.detach().double().cpu().reshape(samples, -1) if samples else torch.zeros(0, 1).double()
        weights = torch.cos(torch.arange(rows.shape[1]).double())
        self.record.tensors[key] = torch.stack(
            [rows @ weights, rows.norm(dim=1), rows.new_full((len(rows),), rows.shape[1])], 1
        )
        self.record.modules.setdefault(name, type(module).__name__)

    def _after_router(self, name: str, router: nn.Module, args: Any, routing: Any) -> None:
        self._see_routing(name, router, args[0], routing.expert_ids_TK, routing.weights_TK)

    def _before_experts(self, name: str, experts: nn.Module, args: Any, kwargs: Any) -> None:
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if len(given) == 3 and given[1].shape == given[2].shape:
            self._see_routing(name, experts, given[0], *sorted(given[1:], key=Tensor.is_floating_point))

    def _see_routing(self, name: str, module: nn.Module, hidden: Tensor, ids: Tensor, weights: Tensor) -> None:
        """Record what experts are given, and whether recomputation chooses the same experts."""
        if not (torch.is_grad_enabled() and module.training):
            return
        known = self._choices.setdefault(name, [])
        chosen = digest(ids)
        self.record.see("one routing decision", *([name] if self.in_backward and chosen not in known else []))
        known.append(chosen)
        by_id = ids.argsort(-1)  # equal scores have any order
        # Detached, because activation checkpointing counts what autograd saves.
        for given, values in zip(
            GIVEN, (hidden, ids.gather(-1, by_id), weights.detach().gather(-1, by_id)), strict=True
        ):
            self._see_values(given + name, module, values)

    def backward(self, loss: Any, backward: Callable[[], Any]) -> Any:
        if self._has_gradients and not any(
            p.grad is not None and local_rows(p.grad).any() for _, p in self.parameters()
        ):
            self.record.see("all micro-batches", f"step {len(self.record.steps) + 1}")
        self.step.losses.append(float(loss.detach()))
        self._at("in a backward", len(self.record.steps) + 1)
        self.in_backward = True
        try:
            return backward()
        finally:
            self.in_backward, self._has_gradients = False, True
            self._choices.clear()

    def clip(self, clip: Callable[[], Any]) -> Any:
        """Record gradients before clipping, and the returned norm."""
        if self.is_clipping:
            return clip()
        self._unclipped = self._finished_gradients()
        self.is_clipping = True
        try:
            norm = clip()
        finally:
            self.is_clipping = False
        if isinstance(norm, (Tensor, float)):
            self.step.norm = float(plain(norm)) if isinstance(norm, Tensor) else norm
        return norm

    def clip_by(self, norm: Tensor, clip: Callable[[], Any]) -> Any:
        """Record the same if a loop clips by its own norm, in one call or in one for each device mesh."""
        if self.is_clipping:
            return clip()
        if self._unclipped is None:
            self._unclipped = self._finished_gradients()
            self.step.norm = float(plain(norm))
        return clip()

    def before_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        known = {id(p) for _, p in self.parameters()}
        if not any(id(p) in known for group in optimizer.param_groups for p in group["params"]):
            return
        self._has_gradients = False
        if all(each is not optimizer for each in self.optimizers):
            self.optimizers.append(optimizer)
        if optimizer is not self.optimizers[0]:
            return
        gradients = self._finished_gradients() if self._unclipped is None else self._unclipped
        self._unclipped = None
        step = len(self.record.steps)
        parameters = dict(self.parameters())
        for name, gradient in gradients.items():
            owned = ownership_of(parameters[name]) is not None
            if self.record.rank == 0 or owned:
                self.record.tensors[f"{step}/gradient/{name}"] = gradient
            if not owned:
                self.step.gradients[name] = digest(gradient)
        self.step.rates = [float(group["lr"]) for group in optimizer.param_groups]

    def _finished_gradients(self) -> dict[str, Tensor]:
        """Return the gradients before clipping, averaged now if an optimizer hook would average them later."""
        for sync in self.syncs:
            sync.before_clip()
        return {name: plain(p.grad) for name, p in self.parameters() if p.grad is not None}

    def after_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self.optimizers or optimizer is not self.optimizers[0]:
            return
        for name, cursor in self._cursors.items():
            self.step.counts[name] = cursor.new_load_E().tolist()
            cursor.advance()
        if self._unreached:
            self.record.see("balance loss in the backward", "aux_loss")
        self._unreached = 0
        self.record.steps.append(self.step)
        self._at("after its update", len(self.record.steps))
        self.step = Step()
        self._open_step = True

    # --- states -----------------------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        from toolkit.experts.layer.stack import expert_stacks

        self._open_step = False
        self.take_phase()
        for model in self.models:
            for name, stack in expert_stacks(model).items():
                if name not in self._cursors or self._cursors[name].log is not stack.log:
                    self._cursors[name] = stack.log.cursor()
        if len(self.record.steps) >= self.steps:
            self.finish()
            raise Finished
        if self.variant == "perturbed":
            perturb(self.parameters(), ROUNDING)

    def take_phase(self) -> None:
        """Record the current weights and optimizer state."""
        number = len(self.record.phases)
        phase = Phase()
        parameters = dict(self.parameters())
        for name, parameter in parameters.items():
            mark = ownership_of(parameter)
            if mark is None:
                phase.digests[name] = digest(plain(parameter))
                if is_spread_by_others(parameter):
                    phase.rows[name] = list(range(len(parameter)))
                    phase.owns[name] = [self.record.rank == 0] * len(parameter)
            else:
                phase.rows[name] = list(mark.row_ids)
                phase.owns[name] = [bool(owns) for owns in mark.owns]
        for key, tensor in self._state().items():
            value = plain(tensor)  # on every rank: it may be a collective
            if self.record.rank == 0 or is_owned(parameters[key.partition("/")[2]]):
                self.record.tensors[f"{number}/{key}"] = value
        self.record.phases.append(phase)

    def _state(self) -> dict[str, Tensor]:
        """Return weights and all optimizer tensors, named `kind/parameter`; not cloned."""
        names = {id(p): name for name, p in self.parameters()}
        state: dict[str, Tensor] = {f"weight/{name}": p.data for name, p in self.parameters()}
        for optimizer in self.optimizers:
            for parameter, values in optimizer.state.items():
                for kind, value in values.items():
                    if isinstance(value, Tensor) and id(parameter) in names:
                        state[f"{kind}/{names[id(parameter)]}"] = value
        return state

    def finish(self) -> None:
        """Record the final state. A collective if the script's way of saving is one."""
        self.done = True
        self._at("which was its last", len(self.record.steps))
        held = {id(p) for o in self.optimizers for group in o.param_groups for p in group["params"]}
        outside = (name for name, p in self.parameters() if held and id(p) not in held)
        self.record.see("parameters in an optimizer", *outside)
        self._save_and_load()
        if self.accelerator is not None:
            self.record.write(self.out)

    @torch.no_grad()
    def _save_and_load(self) -> None:
        main = vars(sys.modules["__main__"])
        if "save_checkpoint" in main and "load_checkpoint" in main:
            self.save, self.load = main["save_checkpoint"], main["load_checkpoint"]
            self.record.saved_by = "save_checkpoint and load_checkpoint of the script"
        elif self.save is None and self.accelerator is not None:
            self.save, self.load = self.accelerator.save_state, self.accelerator.load_state
            self.record.saved_by = "Accelerator.save_state and load_state"
        if self.save is None or self.load is None or not self.optimizers:
            return
        if self.record.world > 1 and not dist.is_initialized():
            self.record.saved_by = ""
            self.record.notes.append("saving was not tried: the script had ended; give it more steps, or fewer here")
            return
        before = {key: plain(tensor) for key, tensor in self._state().items()}
        folder = str(self.out / "saved")
        try:
            saved_as = self.save(folder)
            self.accelerator.wait_for_everyone()
            for tensor in self._state().values():
                tensor.add_(1)
            self.load(saved_as if isinstance(saved_as, Path) else folder)
        except Exception as error:
            self.record.save_error = f"{type(error).__name__}: {error}".splitlines()[0]
            return
        after = self._state()
        rows = self.record.phases[-1].rows
        for key, tensor in before.items():
            now = plain(after[key]) if key in after else torch.empty(0)
            self.record.note_lost(key, tensor, now, rows.get(key.partition("/")[2]))


@torch.no_grad()
def perturb(parameters: Iterable[tuple[str, Tensor]], size: float) -> None:
    """Multiply each weight by 1 plus normally distributed noise of `size`, in place. Zeros stay zeros."""
    for name, parameter in parameters:
        draws = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        noise = torch.randn(local_rows(parameter).shape, generator=draws, dtype=parameter.dtype)
        local_rows(parameter).mul_(1 + size * noise.to(parameter.device))
