"""`toolkit env`: versions and machine, for a bug report."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, distributions, version
from importlib.util import find_spec
from pathlib import Path

from toolkit.errors import EXIT_DONE
from toolkit.run.arguments import Parser
from toolkit.run.hardware import memory_limit_bytes, processor, usable_cores
from toolkit.run.summary import aligned
from toolkit.version import __version__

PACKAGES = ("torch", "accelerate", "transformers", "datasets", "safetensors", "numpy", "wandb", "peft", "trl")
VECTORS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16")
"""Names in /proc/cpuinfo of the instruction sets that torch dispatches on."""
NVIDIA_SMI_S = 10.0
"""Timeout of `nvidia-smi` in seconds."""


def main(argv: Sequence[str]) -> int:
    """Return 0, even if facts are unknown."""
    Parser("toolkit env", __doc__).parse_args(argv)
    rows = [(name, " ".join(_told(find).split())) for name, find in FACTS.items()]
    sys.stdout.write(aligned(rows))
    return EXIT_DONE


def _told(find: Callable[[], str]) -> str:
    """Return `find()` or its error, because bug reports often come from broken installations."""
    try:
        return find()
    except Exception as error:
        return f"unknown ({type(error).__name__}: {error})"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _torch_build() -> str:
    """Read torch/version.py, because importing torch takes seconds and fails if its libraries are broken."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return "no torch"
    text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    found = {name: re.search(rf"^{name}\b.*= ?'(.+)'", text, re.MULTILINE) for name in ("cuda", "hip")}
    return ", ".join(f"{name} {match[1]}" for name, match in found.items() if match) or "for CPUs"


def _nccl() -> str:
    """Return the version of the NCCL package for torch's CUDA builds."""
    found = {dist.name: dist.version for dist in distributions() if (dist.name or "").startswith("nvidia-nccl")}
    return ", ".join(f"{name} {number}" for name, number in found.items()) or "not installed"


def _gpus() -> str:
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=NVIDIA_SMI_S, check=False)
    except FileNotFoundError:
        return "none (no nvidia-smi)"
    except subprocess.TimeoutExpired:
        return f"unknown (nvidia-smi gave no answer within {NVIDIA_SMI_S:.0f} s)"
    if done.returncode:
        return f"unknown (nvidia-smi: {(done.stdout + done.stderr).strip()})"
    return "; ".join(f"{number}: {line.strip()}" for number, line in enumerate(done.stdout.splitlines()))


def _kernels() -> str:
    info = Path("/proc/cpuinfo")
    flags = set(re.findall(r"\w+", info.read_text())) if info.exists() else set()
    return ", ".join(name for name in VECTORS if name in flags) or "no vectors known"


def _memory() -> str:
    import psutil

    memory = psutil.virtual_memory()
    limit = memory_limit_bytes()
    limited = f"limited to {limit / 2**30:.1f} GiB" if limit else "no limit"
    return f"{memory.total / 2**30:.1f} GiB, {memory.available / 2**30:.1f} GiB free, {limited}"


FACTS: dict[str, Callable[[], str]] = {
    "toolkit": lambda: __version__,
    "python": platform.python_version,
    "system": platform.platform,
    "packages": lambda: ", ".join(f"{name} {_version(name) or 'not installed'}" for name in PACKAGES),
    "torch build": _torch_build,
    "NCCL": _nccl,
    "GPUs": _gpus,
    "processor": processor,
    "vectors": _kernels,
    "cores": lambda: f"{usable_cores()} of {os.cpu_count()}",
    "memory": _memory,
}
