"""Report on this machine: versions, devices, free memory, the W&B connection, and an all-reduce over processes."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
import time

import torch

from toolkit.errors import EXIT_DONE, EXIT_USER_ERROR, UserError
from toolkit.experts.parallel.nodes import launched_world
from toolkit.run.accelerator import build_accelerator
from toolkit.run.config.run import RunConfig
from toolkit.run.hardware import free_memory, hardware
from toolkit.run.launch import agent, exits
from toolkit.run.launch.world import check_world
from toolkit.run.provenance import versions
from toolkit.run.summary import aligned
from toolkit.run.tracking.trackers import why_offline

OTHERS = ("transformers", "peft", "wandb")
"""Packages whose versions a bug report needs, if they are installed."""
REDUCED = 2**20
"""Numbers in the all-reduce."""


def report_machine(config: RunConfig) -> int:
    """Print the report, start `config.num_processes` processes for an all-reduce, and return the exit code."""
    if launched_world() is None:
        sys.stdout.write(aligned(_describe()))
        sys.stdout.flush()
    if agent.must_start_processes(config):
        return agent.start_processes(config)
    try:
        check_world(config)
        _all_reduce(config)
    except UserError as error:  # of each rank
        exits.end(EXIT_USER_ERROR, str(error))
    return EXIT_DONE


def _describe() -> list[tuple[str, str]]:
    """Return rows of name and text."""
    others = {name: importlib.metadata.version(name) for name in OTHERS if importlib.util.find_spec(name)}
    gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    free = {device: f"{free_memory(device, 1) / 2**30:.1f} GiB" for device in (torch.device("cpu"), *gpus)}
    reason = why_offline() if "wandb" in others else "not installed"
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if gpus else ""
    return [
        ("versions", ", ".join(f"{name} {version}" for name, version in (versions() | others).items())),
        ("machine", hardware()),
        ("devices", ", ".join(f"{gpu} {torch.cuda.get_device_name(gpu)}" for gpu in gpus) or "cpu"),
        ("free memory", ", ".join(f"{device} {size}" for device, size in free.items())),
        ("backend", f"NCCL {nccl}" if gpus and torch.distributed.is_nccl_available() else "gloo"),
        ("W&B", f"offline ({reason})" if reason else "online"),
    ]


def _all_reduce(config: RunConfig) -> None:
    """Sum numbers over all processes, twice, and print the time of the second. Raises UserError for a wrong sum."""
    accelerator = build_accelerator(config)
    world = accelerator.num_processes
    mine = torch.full((REDUCED,), accelerator.process_index + 1.0, device=accelerator.device)
    for _ in range(2):
        began = time.perf_counter()
        sums = accelerator.reduce(mine).cpu()
        taken_ms = 1000 * (time.perf_counter() - began)
    if not bool((sums == world * (world + 1) / 2).all()):
        raise UserError(f"--num-processes {world}: the all-reduce returns wrong sums. Check NCCL and the drivers.")
    if accelerator.is_main_process:
        sys.stdout.write(
            aligned([("all-reduce ", f"{world} process(es) on {accelerator.device.type}, {taken_ms:.1f} ms for 4 MiB")])
        )
