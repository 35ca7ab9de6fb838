"""What a run prints before its first step: device, processes, precision, data, parameters, steps, idle settings."""

from __future__ import annotations

import torch
from torch import nn

from toolkit.experts.layer.moe_layer import experts_on_ranks
from toolkit.experts.layer.stack import expert_stacks
from toolkit.run.config.callback_options import EarlyStoppingOptions
from toolkit.run.config.experts import ExpertRunConfig
from toolkit.run.config.optimizer_options import ScheduleOptions
from toolkit.run.hardware import describe_memory_limits
from toolkit.run.run import Run
from toolkit.run.summary import aligned
from toolkit.train.optim import warmup_steps


def describe_start(run: Run, model: nn.Module, *, data: str, steps: str) -> str:
    """Aligned lines; `data` and `steps` in words. Called before Accelerate prepares `model`."""
    processes = f"{run.world_size} process{'' if run.world_size == 1 else 'es'}"
    mixed = run.accelerator.mixed_precision
    kind = next(model.parameters()).dtype
    precision = str(kind).removeprefix("torch.") if mixed == "no" else f"mixed precision {mixed}"
    top_k = run.config.top_k if isinstance(run.config, ExpertRunConfig) else None
    rows = [
        ("device", f"{run.device.type}, {processes}, {precision}{_other_gpus(run)}"),
        ("data", data),
        ("parameters", _parameters(model, top_k)),
        ("steps", steps),
    ]
    if run.device.type == "cpu" and (limits := describe_memory_limits()):
        rows.insert(1, ("memory limit", limits))
    return aligned(rows).rstrip()


def print_idle_settings(run: Run, *, max_steps: int, steps_per_epoch: int) -> None:
    """Print a line for each setting of the schedule, the batch size and early stopping that does nothing in a run of
    `max_steps` optimizer steps."""
    config = run.config
    schedule, stopping = config.schedule, config.early_stopping
    if warmup_steps(schedule, steps_per_epoch) >= max_steps:
        by_epochs = schedule.warmup_steps == 0
        flag = f"epochs {schedule.warmup_epochs:g}" if by_epochs else f"steps {schedule.warmup_steps}"
        run.print(f"--schedule.warmup-{flag}: all of the run, of {max_steps} steps, is warm-up below the peak --lr.")
    if schedule.name == "constant" and schedule.final != ScheduleOptions().final:
        run.print(f"--schedule.final {schedule.final:g}: no effect with --schedule.name constant.")
    if schedule.name != "stable_decay" and schedule.decay_steps is not None:
        run.print(f"--schedule.decay-steps {schedule.decay_steps}: no effect with --schedule.name {schedule.name}.")
    if stopping.patience is None:
        for name in ("metric", "min_delta"):
            value = getattr(stopping, name)
            if value != getattr(EarlyStoppingOptions(), name):
                flag = f"--early-stopping.{name.replace('_', '-')}"
                run.print(f"{flag} {value}: no effect without --early-stopping.patience.")


def _other_gpus(run: Run) -> str:
    """That one of several GPUs is used, where nobody asked for one."""
    if run.device.type != "cuda" or run.world_size > 1 or run.config.num_processes == 1:
        return ""
    count = torch.cuda.device_count()
    return f" (one of {count} GPUs: --num-processes {count} uses all)" if count > 1 else ""


def _parameters(model: nn.Module, top_k: int | None) -> str:
    total, active = count_parameters(model, top_k)
    return f"{total:,}" if active is None else f"{total:,}, of which a token uses {active:,}"


def count_parameters(model: nn.Module, top_k: int | None) -> tuple[int, int | None]:
    """The parameters of `model` over all ranks, each expert counted once, without empty slots and inactive experts; and
    those that one token uses, which is sent to `top_k` experts, or None without experts."""
    stacks = expert_stacks(model)
    stacked = {id(parameter) for stack in stacks.values() for parameter in stack.parameters.values()}
    total = active = sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in stacked)
    for name, ranks in experts_on_ranks(model).items():
        stack = stacks[name]
        each = sum(parameter[:1].numel() for parameter in stack.parameters.values())
        experts = len({expert for rank in ranks for expert in rank})
        total, active = total + experts * each, active + min(top_k or experts, experts) * each
    return total, active if stacks and top_k else None
