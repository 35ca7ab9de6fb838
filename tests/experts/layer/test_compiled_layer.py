"""Under `torch.compile` a layer is one graph, and computes what it computes without."""

from __future__ import annotations

from pathlib import Path

from tests.support.forked_python import run_forked


def test_a_compiled_layer_is_one_graph_with_the_same_outputs_and_gradients() -> None:
    done = run_forked(str(Path(__file__).with_name("compiled_layer.py")))
    assert done.returncode == 0, done.stderr
