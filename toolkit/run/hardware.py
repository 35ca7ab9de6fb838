"""Hardware of this machine: processor, cores, memory, memory limit and usage. Importing it does not load torch."""

from __future__ import annotations

import os
import platform
import resource
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    import torch

CGROUPS = Path("/sys/fs/cgroup")


def processor() -> str:
    """Return the processor name, such as `AMD EPYC 7B13`."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_limit_bytes() -> int | None:
    """Return the cgroup memory limit in bytes, the minimum over this group and its parents; None without a limit."""
    limits = []
    for group in own_groups():
        _, controllers, path = group.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, name = (CGROUPS / "memory", "memory.limit_in_bytes") if controllers else (CGROUPS, "memory.max")
        folder = root / path.strip("/")
        # In a container, the path is the host's path, and the container's group is the root.
        for place in (folder, *folder.parents):
            if place.is_relative_to(root):
                with suppress(OSError, ValueError):  # no such group, or "max"
                    limits.append(int((place / name).read_text()))
    return min((limit for limit in limits if limit < psutil.virtual_memory().total), default=None)


def free_memory(device: torch.device, processes: int) -> int:
    """Return the free bytes for a process: GPU memory, or an equal share of host memory for each of `processes`."""
    if device.type == "cuda":
        import torch

        return torch.cuda.mem_get_info(device)[0]
    available = psutil.virtual_memory().available
    return min(available, memory_limit_bytes() or available) // processes


def reset_peak(device: torch.device) -> None:
    """Reset `peak_bytes`. Does nothing for a CPU if the system cannot reset its counter."""
    if device.type == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats(device)
    elif os.access("/proc/self/clear_refs", os.W_OK):
        Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets VmHWM


def peak_bytes(device: torch.device) -> int:
    """Return the peak memory since `reset_peak`: memory allocated by torch on a GPU, else resident memory."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists():
        # Not `ru_maxrss`, which on Linux starts at the memory of the parent process.
        lines = status.read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def own_groups() -> list[str]:
    """Return the lines of /proc/self/cgroup; empty on other systems."""
    try:
        return Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []


def gpu_names() -> str:
    """Return the GPU names, such as `8 x NVIDIA H100 80GB HBM3`; empty without a GPU."""
    import torch

    names = Counter(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    return ", ".join(f"{count} x {name}" for name, count in names.items())


def hardware() -> str:
    """Format as `AMD EPYC 7B13, 16 cores, 125.8 GiB`."""
    memory = memory_limit_bytes() or psutil.virtual_memory().total
    return f"{processor()}, {usable_cores()} cores, {memory / 2**30:.1f} GiB"
