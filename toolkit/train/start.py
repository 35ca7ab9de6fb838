"""The lines before the first step of a run: device, processes, precision, data, parameters, steps, warnings."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from toolkit.data.batches import TrainBatches
from toolkit.data.loader import LoaderBatches
from toolkit.data.splits import HasSplits
from toolkit.experts.layer.losses import RouterPenalty
from toolkit.experts.layer.moe_layer import Experts
from toolkit.experts.parallel.ddp import BATCH_NORM_IS_LOCAL, has_batch_norm
from toolkit.experts.parallel.groups import ExpertGroups
from toolkit.run.config.experts import ExpertRunConfig, MoERunConfig
from toolkit.run.console import describe_processes
from toolkit.run.hardware import gpu_names, memory_limit_bytes
from toolkit.run.run import Run
from toolkit.run.summary import aligned
from toolkit.train.optim import warmup_steps


def announce(
    run: Run,
    model: nn.Module,
    experts: Experts,
    data: HasSplits,
    batches: TrainBatches | LoaderBatches,
    max_steps: int,
    penalty: RouterPenalty | None,
) -> None:
    """Record and print what is trained, on which devices and for how many steps, with warnings.

    Call it before Accelerate prepares `model`.

    Args:
        experts: The experts of `model`.
        penalty: The router losses of the config, or None.
    """
    config = run.config
    dataset, notice = getattr(data, "name", None), getattr(data, "notice", None)
    facts: dict[str, Any] = {"effective_batch_size": config.batch_size, "peak_learning_rate": config.peak_lr}
    if isinstance(config, ExpertRunConfig):
        facts |= describe_experts(experts, run.expert_groups)
    if dataset is not None:
        facts |= {"dataset": dataset, "dataset_notice": notice}
    run.describe(**facts)
    warnings = []
    if penalty is not None and isinstance(config, MoERunConfig):
        warnings = settings_without_effect(config, experts)
        if penalty.balance_weight > config.balance_weight:
            weight = f"{penalty.balance_weight:.2g}"
            warnings.append(f"the balance loss has weight {weight}, because the run has {max_steps:,} steps.")
    warnings += warnings_of(run, model, experts, data, batches.steps_per_epoch, max_steps)
    run.print("\n".join([*warnings, aligned(describe_start(run, model, experts, batches, max_steps)).rstrip()]))


def describe_experts(experts: Experts, groups: ExpertGroups) -> dict[str, Any]:
    """Return facts for `Run.describe`: EP group size, ranks of each group unless they are neighbours, and the placement
    of each layer.

    The placement is a function, because experts migrate, and dynamic experts are added and removed during training.
    """
    facts: dict[str, Any] = {"ep_size": groups.ep_size, "expert_placement": experts.on_ranks}
    if any(group[-1] - group[0] >= groups.ep_size for group in groups.ep_groups):
        facts["ep_groups"] = [list(group) for group in groups.ep_groups]
    return facts


def settings_without_effect(config: MoERunConfig, experts: Experts) -> list[str]:
    """Return a warning for each setting that routers and layers of `experts` were built without."""
    layers, warnings = experts.moe, []
    if others := ", ".join(sorted(experts.stacks.keys() - layers.keys())):
        warnings.append(
            f"balance={config.balance}, balance_weight, z_weight and capacity_factor: have no effect on {others}."
        )
    for name, layer in layers.items():
        built = layer.router.options.model_dump() | {"capacity_factor": layer.capacity_factor}
        warnings += [
            f"{field}={getattr(config, field)}: has no effect on {name}, which was built with {value}."
            for field, value in built.items()
            if getattr(config, field) != value
        ]
    return warnings


def warnings_of(
    run: Run, model: nn.Module, experts: Experts, data: HasSplits, steps_per_epoch: int, max_steps: int
) -> list[str]:
    """Return a warning for each thing that is probably not meant, such as a run that is warm-up to its end."""
    config, stacks, warnings = run.config, list(experts.stacks.values()), []
    if warmup_steps(config.schedule, steps_per_epoch) >= max_steps:
        given = "warmup_steps" if config.schedule.warmup_steps else "warmup_epochs"
        value = getattr(config.schedule, given)
        warnings.append(f"schedule.{given}={value:g}: all {max_steps} steps are warm-up, below the peak learning rate.")
    may_share = isinstance(config, ExpertRunConfig) and config.ep_size is None and run.world_size > 1
    if may_share and stacks and stacks[0].groups.ep_size == 1:
        why = f"{stacks[0].num_experts} experts and {run.world_size} processes have no common divisor"
        warnings.append(f"ep_size=1: every process has all experts, because {why}.")
    if run.world_size > 1 and not config.sync_bn and has_batch_norm(model):
        warnings.append(f"{BATCH_NORM_IS_LOCAL}sync_bn=True has it over all")
    if config.validates and getattr(data, "validation", None) is None:
        warnings.append("no validation data: early stopping and the best checkpoint go by test data.")
    return warnings


def describe_start(
    run: Run, model: nn.Module, experts: Experts, batches: TrainBatches | LoaderBatches, max_steps: int
) -> list[tuple[str, str]]:
    """Return rows of name and text: device, memory limit, data, parameters, steps, scaled learning rate."""
    config = run.config
    mixed = run.accelerator.mixed_precision
    kind = next(model.parameters()).dtype
    precision = str(kind).removeprefix("torch.") if mixed == "no" else f"mixed precision {mixed}"
    gpus = f" ({gpu_names()})" if run.device.type == "cuda" else ""
    rows = [("device", f"{run.device.type}{gpus}, {describe_processes(run.world_size)}, {precision}{_other_gpus(run)}")]
    if run.device.type == "cpu" and (limit := memory_limit_bytes()) is not None:
        rows.append(("memory limit", f"{limit / 2**30:.1f} GiB for all processes"))
    total, active = count_parameters(model, experts, config.top_k if isinstance(config, ExpertRunConfig) else None)
    used = "" if active is None else f", of which a token uses {active:,}"
    if isinstance(batches, TrainBatches):
        samples = f"{len(batches.table):,} training samples"
    else:
        samples = "batches of unknown number" if batches.endless else f"{batches.steps_per_epoch:,} batches an epoch"
    epochs = max_steps / batches.steps_per_epoch
    rows += [
        ("data", ", ".join(filter(None, (run.facts.get("dataset"), samples)))),
        ("parameters", f"{total:,}{used}"),
        ("steps", f"{max_steps:,} of {config.batch_size:,} samples, {epochs:.4g} epoch(s)"),
    ]
    if config.scale_lr is not None:
        rows.append(("peak lr", f"{config.peak_lr:g}, scaled from {config.lr:g} for {config.scale_lr} samples"))
    return rows


def _other_gpus(run: Run) -> str:
    """Say that one of several GPUs is used, if the config does not ask for one."""
    if run.device.type != "cuda" or run.world_size > 1 or run.config.num_processes == 1:
        return ""
    count = torch.cuda.device_count()
    return f" (one of {count} GPUs: --num-processes {count} uses all)" if count > 1 else ""


def count_parameters(model: nn.Module, experts: Experts, top_k: int | None) -> tuple[int, int | None]:
    """Count the parameters of `model` over all ranks, without empty slots and inactive experts.

    Returns:
        All parameters, each expert counted once, and the parameters that a token uses, which is sent to `top_k`
        experts; None for these without experts.
    """
    stacks = experts.stacks
    stacked = {id(parameter) for stack in stacks.values() for parameter in stack.parameters.values()}
    total = active = sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in stacked)
    for name, ranks in experts.on_ranks().items():
        stack = stacks[name]
        each = sum(parameter[:1].numel() for parameter in stack.parameters.values())
        count = len({expert for rank in ranks for expert in rank})
        total, active = total + count * each, active + min(top_k or count, count) * each
    return total, active if stacks and top_k else None
