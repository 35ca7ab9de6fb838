"""Under `torch.compile` a layer is one graph, and computes what it computes without."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.helpers import program_environment


def test_a_compiled_layer_is_one_graph_with_the_same_outputs_and_gradients() -> None:
    command = [sys.executable, str(Path(__file__).with_name("compiled_layer.py"))]
    done = subprocess.run(command, env=program_environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
