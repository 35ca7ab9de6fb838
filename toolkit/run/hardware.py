"""The machine that a process runs on: processor, cores, memory and its limit. Nothing heavy is imported."""

from __future__ import annotations

import os
import platform
import resource
import sys
from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")


def processor() -> str:
    """The name of the processor, such as `AMD EPYC 7B13`."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def memory_limit_bytes() -> int | None:
    """Bytes that this process's control group may use, the least of its own and its parents'; None without a limit."""
    limits = []
    for group in own_groups():
        _, controllers, path = group.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, name = (CGROUPS / "memory", "memory.limit_in_bytes") if controllers else (CGROUPS, "memory.max")
        folder = root / path.strip("/")
        # In a container the path is that of the host, and its own group is the root.
        for place in (folder, *folder.parents):
            if place.is_relative_to(root):
                limits.append(_limit(place / name))
    found = [limit for limit in limits if limit is not None and limit < psutil.virtual_memory().total]
    return min(found, default=None)


def mappable_bytes() -> int | None:
    """Bytes that this process may still map, by its own limits (`ulimit -v` and `-d`); None without a limit."""
    used = psutil.Process().memory_info()
    limits = {resource.RLIMIT_AS: used.vms, resource.RLIMIT_DATA: getattr(used, "data", 0)}
    left = [
        max(0, resource.getrlimit(kind)[0] - taken)
        for kind, taken in limits.items()
        if resource.getrlimit(kind)[0] != resource.RLIM_INFINITY
    ]
    return min(left, default=None)


def describe_memory_limits() -> str:
    """Such as `4.0 GiB for all processes (control group), 1.5 GiB left of this one's own (ulimit)`; "" without any."""
    group, own = memory_limit_bytes(), mappable_bytes()
    words = [f"{group / 2**30:.1f} GiB for all processes (control group)"] if group is not None else []
    words += [f"{own / 2**30:.1f} GiB left of this process's own (ulimit)"] if own is not None else []
    return ", ".join(words)


def own_groups() -> list[str]:
    """The lines of /proc/self/cgroup; none on other systems."""
    try:
        return Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []


def hardware() -> str:
    """Such as `AMD EPYC 7B13, 16 cores, 125.8 GiB`."""
    memory = memory_limit_bytes() or psutil.virtual_memory().total
    return f"{processor()}, {usable_cores()} cores, {memory / 2**30:.1f} GiB"


def _limit(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such group, or "max"
        return None
