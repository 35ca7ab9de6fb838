"""Random states of a checkpoint."""

import json
import random

import numpy as np
import torch

from toolkit.experts.state.random_states import random_states, restore_random_states


def draw() -> tuple[float, float, float]:
    return random.random(), np.random.rand(), torch.rand(()).item()


def test_restored_random_states_repeat_draws_of_python_numpy_and_torch():
    states = json.loads(json.dumps(random_states()))
    expected = draw()
    assert draw() != expected
    restore_random_states(states)
    assert draw() == expected
