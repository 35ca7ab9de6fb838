from benchmarks.support.peak_memory import peak_bytes
from benchmarks.support.processes import (
    ROOT,
    fork_context,
    free_port,
    program_environment,
    run_distributed,
    run_recipe,
)
from tests.support.symlinks import planted

__all__ = [
    "ROOT",
    "fork_context",
    "free_port",
    "peak_bytes",
    "planted",
    "program_environment",
    "run_distributed",
    "run_recipe",
]
