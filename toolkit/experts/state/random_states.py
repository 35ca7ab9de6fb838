"""The states of a process's random generators, as plain JSON values."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def random_states() -> dict[str, Any]:
    """The states of all generators of this process, as JSON values."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    devices = torch.cuda.random.get_rng_state_all() if torch.cuda.is_available() else []
    return {
        "python": random.getstate(),
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
        "torch": [state.tolist() for state in (torch.random.get_rng_state(), *devices)],
    }


def restore_random_states(states: dict[str, Any]) -> None:
    """Set the generators of this process to what `random_states` returned. GPUs are set if their number is the same."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(tuple(states["numpy"]))
    of_cpu, *of_devices = (torch.tensor(state, dtype=torch.uint8) for state in states["torch"])
    torch.random.set_rng_state(of_cpu)
    if torch.cuda.is_available() and len(of_devices) == torch.cuda.device_count():
        torch.cuda.random.set_rng_state_all(of_devices)
