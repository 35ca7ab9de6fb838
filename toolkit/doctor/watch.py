"""Run a script under the recorder:
`python -m toolkit.doctor.watch OUT STEPS VARIANT WAIT SCRIPT [ARGUMENT ...]`.

Accelerate, torch and this toolkit are patched so that they call the recorder.
"""

from __future__ import annotations

import contextlib
import functools
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import accelerate
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate.scheduler import AcceleratedScheduler
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DistributedSampler

from toolkit.doctor.record import Record
from toolkit.doctor.recorder import SPLIT_NOTE, Finished, Hook, Recorder, Variant
from toolkit.experts.parallel import groups, sync
from toolkit.experts.parallel.sync import ExpertSync

DROPOUT_NOTE = "dropout was switched off: masks differ between ranks"


def watch(out: Path, steps: int, script: str, args: list[str], variant: Variant = "as it is") -> Record:
    """Run `script` as if from the command line, and leave it after `steps` optimizer steps."""
    recorder = Recorder(out, steps, variant)
    attach(recorder)
    sys.argv = [script, *args]
    sys.path[0] = str(Path(script).resolve().parent)
    with contextlib.suppress(Finished):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as stop:
            if stop.code not in (None, 0):
                raise
    if not recorder.done:  # it came to its end before
        if recorder._open_step and recorder.record.phases:
            recorder.take_phase()
        recorder.finish()
    return recorder.record


def main() -> None:
    out, steps, variant, wait_s, script, *args = sys.argv[1:]
    limit_waits(float(wait_s))
    code = 0
    try:
        watch(Path(out), int(steps), script, args, cast(Variant, variant))
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # without destroying the process group: another rank may never get there


# --- patches ----------------------------------------------------------------------------------------------------


def attach(recorder: Recorder) -> None:
    """Patch the script's libraries so that they call the recorder, for the rest of this process."""
    _attach_accelerator(recorder)
    register_optimizer_step_pre_hook(recorder.before_update)
    register_optimizer_step_post_hook(recorder.after_update)
    clip = torch.nn.utils.clip_grad_norm_
    _replace(clip, lambda *args, **kw: recorder.clip(lambda: clip(*args, **kw)), torch.nn.utils)
    scale = torch.nn.utils.clip_grads_with_norm_

    def scale_gradients(parameters: Any, max_norm: float, norm: Tensor, *args: Any, **kw: Any) -> None:
        recorder.clip_by(norm, lambda: scale(parameters, max_norm, norm, *args, **kw))

    torch.nn.utils.clip_grads_with_norm_ = scale_gradients  # type: ignore[assignment]  # which has all arguments
    if "WORLD_SIZE" not in os.environ or os.environ["WORLD_SIZE"] == "1":
        _replace(groups.make_expert_groups, lambda *_, **__: groups.ExpertGroups(), groups)
    _switch_off_dropout(recorder)
    _attach_sampler(recorder)
    _attach_ours(recorder)


def _switch_off_dropout(recorder: Recorder) -> None:
    """Disable dropout in modules, which call these functions, and outside of them, but not inside LSTMs."""

    def note(p: float, training: bool = True) -> None:
        if p and training:
            recorder.note(DROPOUT_NOTE)

    def without(original: Callable[..., Tensor], training: bool) -> Callable[..., Tensor]:
        def call(input: Tensor, p: float = 0.5, training: bool = training, *args: Any, **kw: Any) -> Tensor:
            note(p, training)
            return original(input, 0.0, training, *args, **kw)

        return call

    for function in (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d):
        _replace(function, without(function, training=True), F)
    for function in (F.alpha_dropout, F.feature_alpha_dropout):
        _replace(function, without(function, training=False), F)
    attend = F.scaled_dot_product_attention

    def attend_without(*args: Any, **kw: Any) -> Tensor:  # query, key, value, attn_mask, dropout_p, ...
        note(args[4] if len(args) > 4 else kw.pop("dropout_p", 0.0))
        return attend(*args[:4], *([0.0] if len(args) > 4 else []), *args[5:], **kw)

    _replace(attend, attend_without, F)


def limit_waits(wait_s: float) -> None:
    """Set the timeout of collectives, in seconds."""
    limit = timedelta(seconds=wait_s)
    for start in (dist.init_process_group, dist.new_group):

        def start_limited(*args: Any, _start: Callable[..., Any] = start, **settings: Any) -> Any:
            return _start(*args, **(settings | {"timeout": min(settings.get("timeout") or limit, limit)}))

        _replace(start, start_limited, dist)


def _replace(original: Any, replacement: Any, owner: Any) -> None:
    """Replace `original` in its home module and in all modules that imported it by name."""
    name = original.__name__
    functools.update_wrapper(replacement, original)
    for module in [owner, *list(sys.modules.values())]:
        if getattr(module, "__dict__", {}).get(name) is original:
            setattr(module, name, replacement)


def _attach_sampler(recorder: Recorder) -> None:
    def iterate(original: Callable[..., Any], self: Any) -> Iterator[int]:
        ended = vars(self).setdefault("_ended_epochs", set())
        if self.shuffle and self.epoch in ended:
            recorder.record.see("order of epochs", type(self).__name__)
        yield from original(self)
        ended.add(self.epoch)

    wrap_method(DistributedSampler, "__iter__", iterate)


def _attach_accelerator(recorder: Recorder) -> None:
    def init(original: Callable[..., Any], self: Any, *args: Any, **settings: Any) -> None:
        loading = settings.get("dataloader_config") or accelerate.DataLoaderConfiguration()
        recorder.script_splits = loading.split_batches
        loading.split_batches = loading.use_seedable_sampler = True
        if loading.data_seed is None:
            loading.data_seed = 0
        original(self, *args, **(settings | {"dataloader_config": loading}))

    def prepare(original: Callable[..., Any], self: Any, *args: Any, **settings: Any) -> Any:
        models = [m for m in args if isinstance(m, nn.Module) and not isinstance(m, DistributedDataParallel)]
        if not recorder.script_splits and any(isinstance(part, torch.utils.data.DataLoader) for part in args):
            recorder.note(SPLIT_NOTE)
        result = recorder.prepare(self, models, lambda: original(self, *args, **settings))
        for wrapper in result if isinstance(result, tuple) else (result,):
            if isinstance(wrapper, DistributedDataParallel) and not recorder.is_preparing:
                wrapper.register_forward_pre_hook(Hook(recorder.before_wrapped_forward))
        return result

    def backward(original: Callable[..., Any], self: Any, loss: Any, **settings: Any) -> Any:
        return recorder.backward(loss, lambda: original(self, loss, **settings))

    def step(original: Callable[..., Any], self: Any, *args: Any, **settings: Any) -> None:
        by_doctor = SPLIT_NOTE in recorder.record.notes and recorder.variant != "stepped for each process"
        self.split_batches = recorder.script_splits or by_doctor
        if not self.split_batches and SPLIT_NOTE in recorder.record.notes:
            recorder.note("the scheduler makes a step for each process, as Accelerate's default is")
        original(self, *args, **settings)

    for name, call in {"__init__": init, "prepare": prepare, "prepare_model": prepare, "backward": backward}.items():
        wrap_method(accelerate.Accelerator, name, call)
    wrap_method(accelerate.Accelerator, "clip_grad_norm_", functools.partial(_clip, recorder))
    wrap_method(AcceleratedScheduler, "step", step)


def _clip(recorder: Recorder, original: Callable[..., Any], *args: Any, **settings: Any) -> Any:
    return recorder.clip(lambda: original(*args, **settings))


def _attach_ours(recorder: Recorder) -> None:
    """Watch this toolkit in addition to torch and Accelerate: how it saves, and the penalty of the router."""
    from toolkit.experts.layer.losses import RouterPenalty
    from toolkit.integrations.accelerate.expert_parallel import ExpertParallel
    from toolkit.run.launch import exits
    from toolkit.train.trainer import Trainer

    exits.leave = sys.exit  # type: ignore[assignment]  # which would end the process before the record is written

    def remember(cls: Any, save: Callable[[Any], Any], load: Callable[[Any], Any], name: str) -> None:
        def init(original: Callable[..., Any], self: Any, *args: Any, **settings: Any) -> None:
            original(self, *args, **settings)
            recorder.save = save(self)
            recorder.load = load(self)
            recorder.record.saved_by = name

        wrap_method(cls, "__init__", init)

    def note_penalty(original: Callable[..., Any], self: Any) -> Any:
        value = original(self)
        if value is not None and torch.is_grad_enabled():
            recorder.step.penalties.append(float(value.detach()))
        return value

    def note_sync(original: Callable[..., Any], self: ExpertSync, *args: Any, **settings: Any) -> None:
        recorder.syncs.append(self)
        original(self, *args, **settings)

    remember(Trainer, lambda t: lambda _: t.save(), lambda t: t.restore, "Trainer.save and restore")
    remember(ExpertParallel, lambda e: e.save, lambda e: e.load, "ExpertParallel.save and load")
    wrap_method(RouterPenalty, "share", note_penalty)
    wrap_method(ExpertSync, "__init__", note_sync)
    wrap_method(sync, "clip_gradients", functools.partial(_clip, recorder))


def wrap_method(cls: Any, name: str, call: Callable[..., Any]) -> None:
    """Have a method of a class, or a function of a module, be `call(original, *args)`, for the rest of this process."""
    original = getattr(cls, name)

    @functools.wraps(original)
    def called(*args: Any, **settings: Any) -> Any:
        return call(original, *args, **settings)

    setattr(cls, name, called)


if __name__ == "__main__":
    main()
