"""What a run prints before its first step: device, processes, precision, data, parameters, steps, warnings."""

from __future__ import annotations

import torch
from torch import nn

from toolkit.data.batches import TrainBatches
from toolkit.data.loader import LoaderBatches
from toolkit.experts.layer.losses import RouterPenalty
from toolkit.experts.layer.moe_layer import describe_experts, experts_on_ranks, moe_layers
from toolkit.experts.layer.stack import expert_stacks
from toolkit.run.config.experts import ExpertRunConfig, MoERunConfig
from toolkit.run.hardware import gpu_names, memory_limit_bytes
from toolkit.run.run import Run
from toolkit.run.summary import aligned
from toolkit.train.optim import warmup_steps


def announce(
    run: Run,
    model: nn.Module,
    data: object,
    batches: TrainBatches | LoaderBatches,
    max_steps: int,
    penalty: RouterPenalty | None,
) -> None:
    """Record and print what is trained, on what and how long, and warn of settings without effect.

    Call it before Accelerate prepares `model`. `penalty` is the config's.
    """
    config = run.config
    if isinstance(config, MoERunConfig) and penalty is not None:
        _name_settings_without_effect(run, model, config)
        if penalty.balance_weight > config.balance_weight:
            run.print(
                f"the balance loss has the weight {penalty.balance_weight:.2g}, because the run has {max_steps:,} "
                "steps only"
            )
    if isinstance(config, ExpertRunConfig):
        run.describe(**describe_experts(model, run.expert_groups))
    print_warnings(run, model, warmup_steps(config.schedule, batches.steps_per_epoch), max_steps)
    if (name := getattr(data, "name", None)) is not None:
        run.describe(dataset=name, dataset_notice=getattr(data, "notice", None))
    run.describe(effective_batch_size=config.batch_size, peak_learning_rate=config.peak_lr)
    if config.scale_lr is not None:
        scaled = f"{config.peak_lr:g}, from {config.lr:g} for {config.scale_lr} samples"
        run.print(f"learning rate {scaled}: the effective batch is {config.batch_size}")
    if isinstance(batches, TrainBatches):
        samples = f"{len(batches.table):,} training samples"
    else:
        samples = "batches of unknown number" if batches.endless else f"{batches.steps_per_epoch:,} batches an epoch"
    dataset = run.facts.get("dataset")
    epochs = max_steps / batches.steps_per_epoch
    steps = f"{max_steps:,} of {config.batch_size:,} samples, {epochs:.4g} epoch(s)"
    run.print(describe_start(run, model, data=f"{dataset}, {samples}" if dataset else samples, steps=steps))


def _name_settings_without_effect(run: Run, model: nn.Module, config: MoERunConfig) -> None:
    """Print the settings that the layers of `model` do not have: a router and a layer get them when they are built."""
    layers = moe_layers(model)
    if others := ", ".join(sorted(expert_stacks(model).keys() - layers.keys())):
        run.note(f"balance={config.balance}, balance_weight, z_weight and capacity_factor: have no effect on {others}.")
    for name, layer in layers.items():
        built = layer.router.options.model_dump() | {"capacity_factor": layer.capacity_factor}
        for field, value in built.items():
            if getattr(config, field) != value:
                run.note(f"{field}={getattr(config, field)}: has no effect on {name}, which was built with {value}.")


def describe_start(run: Run, model: nn.Module, *, data: str, steps: str) -> str:
    """Aligned lines; `data` and `steps` in words."""
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


def print_warnings(run: Run, model: nn.Module, warmup_steps: int, max_steps: int) -> None:
    """Print what is probably not meant: a run of warm-up only, and experts that the ranks cannot share."""
    config, stacks = run.config, list(expert_stacks(model).values())
    if warmup_steps >= max_steps:
        given = "warmup_steps" if config.schedule.warmup_steps else "warmup_epochs"
        value = getattr(config.schedule, given)
        run.note(f"schedule.{given}={value:g}: all of the run, of {max_steps} steps, is warm-up below the peak lr.")
    may_share = isinstance(config, ExpertRunConfig) and config.ep_size is None and run.world_size > 1
    if may_share and stacks and stacks[0].groups.ep_size == 1:
        why = f"{stacks[0].num_experts} experts and {run.world_size} processes have no common divisor"
        run.note(f"ep_size=1: every process has all experts, because {why}.")


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
