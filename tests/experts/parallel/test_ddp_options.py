"""The flags of DDP reach DDP, and a run under them learns what it learns without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.support.processes import run_distributed
from tests.support.small_run import small_config, small_trainer
from toolkit.experts.parallel.parallel_options import DDPOptions

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "views": {"gradient_as_bucket_view": True, "bucket_cap_mb": 1, "broadcast_buffers": False},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "fp16": {"comm_hook": "fp16"},
}


def weights(folder: Path) -> dict[str, tuple[dict[str, Any], list[Tensor]]]:
    """For each of `OPTIONS`, what DDP was given, and the weights after four steps on two ranks."""
    found = {}
    for name, options in OPTIONS.items():
        config = small_config(folder / name, max_steps=4, ddp=DDPOptions(**options))
        with small_trainer(config, ep_size=2) as trainer:
            trainer.fit()
            model = trainer.model
            assert isinstance(model, DistributedDataParallel)
            given = {
                "find_unused_parameters": model.find_unused_parameters,
                "static_graph": model.static_graph,
                "bucket_cap_mb": model.bucket_bytes_cap // 2**20,
                "gradient_as_bucket_view": model.gradient_as_bucket_view,
                "broadcast_buffers": model.broadcast_buffers,
            }
            found[name] = given, [p.detach().clone() for p in trainer.raw_model.parameters()]
    return found


def test_options_reach_ddp_and_change_only_how_gradients_travel(tmp_path: Path):
    found, _ = run_distributed(weights, 2, tmp_path)
    _, usual = found["default"]
    for name, (given, learned) in found.items():
        asked = DDPOptions(**OPTIONS[name]).model_dump()
        rounds = asked.pop("comm_hook") != "no"
        assert given == asked
        largest = max((a - b).abs().max().item() for a, b in zip(usual, learned, strict=True))
        assert (1e-6 < largest < 0.02) if rounds else largest < 1e-6, (name, largest)
