"""What a run prints before its first step: device, processes, precision, data, parameters, steps, idle settings."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from toolkit.experts.layer.moe_layer import experts_on_ranks
from toolkit.experts.layer.stack import expert_stacks
from toolkit.experts.options import Options
from toolkit.run.config.experts import ExpertRunConfig
from toolkit.run.hardware import gpu_names, memory_limit_bytes
from toolkit.run.run import Run
from toolkit.run.summary import aligned


def describe_start(run: Run, model: nn.Module, *, data: str, steps: str) -> str:
    """Aligned lines; `data` and `steps` in words. Called before Accelerate prepares `model`."""
    processes = f"{run.world_size} process{'' if run.world_size == 1 else 'es'}"
    mixed = run.accelerator.mixed_precision
    kind = next(model.parameters()).dtype
    precision = str(kind).removeprefix("torch.") if mixed == "no" else f"mixed precision {mixed}"
    top_k = run.config.top_k if isinstance(run.config, ExpertRunConfig) else None
    rows = [
        ("device", f"{run.device.type}{_gpus(run)}, {processes}, {precision}{_other_gpus(run)}"),
        ("data", data),
        ("parameters", _parameters(model, top_k)),
        ("steps", steps),
    ]
    if run.device.type == "cpu" and (limit := memory_limit_bytes()) is not None:
        rows.insert(1, ("memory limit", f"{limit / 2**30:.1f} GiB for all processes"))
    return aligned(rows).rstrip()


def print_idle_settings(
    run: Run,
    model: nn.Module,
    *,
    warmup_steps: int,
    max_steps: int,
    own_loader: bool = False,
    own_schedule: bool = False,
    own_evaluation: object = None,
    endless: bool = False,
) -> None:
    """Print a line for each setting that is not the usual one and does nothing in this run.

    Args:
        run: Its config has the settings.
        model: Holds the experts, if there are any.
        warmup_steps: Optimizer steps of warm-up, as the config says.
        max_steps: Optimizer steps of the run.
        own_loader: Training data come from a DataLoader of the recipe's.
        own_schedule: The recipe has a scheduler of its own.
        own_evaluation: What evaluates in a recipe that does so by itself; it may have the setting `every_steps`.
        endless: Nobody knows how long an epoch is.
    """
    config = run.config
    shape, alone = config.schedule.name, run.world_size == 1
    stacks = list(expert_stacks(model).values())
    takes_steps = getattr(own_evaluation, "every_steps", None) is not None
    by_itself = "because the recipe evaluates by itself"
    spread = "on one process" if alone else f"with dense_parallel={config.dense_parallel!r}"
    rows = [
        (shape == "constant", ["schedule.final"], f"with schedule.name={shape!r}"),
        (shape != "stable_decay", ["schedule.decay_steps"], f"with schedule.name={shape!r}"),
        (own_schedule, _names(config, "schedule"), "because the recipe has a scheduler of its own"),
        (
            config.early_stopping.patience is None,
            ["early_stopping.metric", "early_stopping.min_delta"],
            "with early_stopping.patience=None",
        ),
        (endless, ["eval_every"], "where nobody knows how long an epoch is: use eval_every_steps"),
        (config.eval_every_steps is not None, ["eval_every"], "with eval_every_steps"),
        (own_evaluation is not None, ["eval_every"], by_itself),
        (own_evaluation is not None and not takes_steps, ["eval_every_steps"], by_itself),
        (alone, ["sync_bn"], "on one process"),
        (own_loader, ["num_workers"], "because the DataLoader has its own"),
        (alone, ["dense_parallel"], spread),
        (alone or config.dense_parallel == "ddp", ["fsdp_size"], spread),
        (alone or config.dense_parallel != "ddp", _names(config, "ddp"), spread),
        (
            bool(stacks) and stacks[0].groups.ep_size == 1,
            ["replan.planner", "spare_slots", "ep_stride"],
            "because every process has all experts",
        ),
    ]
    idle = {name: why for holds, names, why in rows if holds for name in names}
    for name, why in idle.items():
        if (value := _changed(config, name)) is not None:
            run.note(f"{name}={value!r}: no effect {why}.")
    if warmup_steps >= max_steps and not own_schedule:
        given = "warmup_steps" if config.schedule.warmup_steps else "warmup_epochs"
        value = getattr(config.schedule, given)
        run.note(f"schedule.{given}={value:g}: all of the run, of {max_steps} steps, is warm-up below the peak lr.")


def _names(config: Options, group: str) -> list[str]:
    return [f"{group}.{name}" for name in type(getattr(config, group)).model_fields]


def _changed(config: Options, name: str) -> Any:
    """The setting of this dotted name, or None where `config` lacks it or has its class's default."""
    group, _, rest = name.partition(".")
    field = type(config).model_fields.get(group)
    value = getattr(config, group, None)
    if rest and isinstance(value, Options):
        return _changed(value, rest)
    return None if field is None or value == field.default else value


def _gpus(run: Run) -> str:
    return f" ({gpu_names()})" if run.device.type == "cuda" else ""


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
