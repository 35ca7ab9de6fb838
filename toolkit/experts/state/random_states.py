"""The states of a process's random generators, as plain JSON values."""

from __future__ import annotations

import random
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import BaseModel, Field, StrictFloat, StrictInt, StrictStr

from toolkit.errors import one_line

_Byte = Annotated[StrictInt, Field(ge=0, le=255)]


class RandomStates(BaseModel):
    """The types of what `random_states` returns."""

    python: tuple[StrictInt, list[StrictInt], StrictFloat | None]
    numpy: tuple[StrictStr, list[StrictInt], StrictInt, StrictInt, StrictFloat]
    torch: Annotated[list[list[_Byte]], Field(min_length=1)]


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
    """Give the generators of this process what `random_states` returned."""
    _restore(states, random, np.random, torch.default_generator)
    if devices := _of_devices(states):
        torch.cuda.random.set_rng_state_all(devices)


def oddity_of_random_states(states: dict[str, Any]) -> str | None:
    """Why the generators of this process cannot be given `states`, which are of the types of `RandomStates`, as half a
    sentence. Others are given them, so that none is changed."""
    try:
        _restore(states, random.Random(), np.random.RandomState(), torch.Generator())
        for number, state in enumerate(_of_devices(states)):
            torch.Generator(f"cuda:{number}").set_state(state)
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        return f"its random states are none ({one_line(error)})"
    return None


def _restore(states: dict[str, Any], of_python: Any, of_numpy: Any, of_torch: torch.Generator) -> None:
    version, internal, gauss = states["python"]
    of_python.setstate((version, tuple(internal), gauss))
    of_numpy.set_state(tuple(states["numpy"]))
    of_torch.set_state(torch.tensor(states["torch"][0], dtype=torch.uint8))


def _of_devices(states: dict[str, Any]) -> list[torch.Tensor]:
    """Returns the states of this process's GPUs, where as many were saved."""
    saved = states["torch"][1:]
    is_fit = torch.cuda.is_available() and len(saved) == torch.cuda.device_count()
    return [torch.tensor(state, dtype=torch.uint8) for state in saved] if is_fit else []
