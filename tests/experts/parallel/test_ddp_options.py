"""Options and constant buffers of DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn

from benchmarks.support.processes import run_distributed
from tests.support.small_run import small_config, small_trainer
from toolkit.experts.parallel.parallel_options import DDPOptions
from toolkit.integrations.accelerate.prepare import prepare

OPTIONS: list[dict[str, Any]] = [
    {},
    {"gradient_as_bucket_view": True, "bucket_cap_mb": 1, "broadcast_buffers": False},
    {"find_unused_parameters": True},
    {"static_graph": True},
    {"comm_hook": "fp16"},
]


def train(folder: Path) -> list[tuple[dict[str, Any], Tensor]]:
    """Return the attributes of DDP and the trained weights for each of `OPTIONS`."""
    found = []
    for number, options in enumerate(OPTIONS):
        config = small_config(folder / str(number), max_steps=4, ddp=DDPOptions(**options))
        with small_trainer(config, ep_size=2) as trainer:
            trainer.fit()
            ddp = trainer.model
            names = DDPOptions.model_fields.keys() - {"comm_hook", "bucket_cap_mb"}
            attributes = {name: getattr(ddp, name) for name in names}
            attributes["bucket_cap_mb"] = ddp.bucket_bytes_cap // 2**20
            weights = [p.detach().flatten() for p in trainer.raw_model.parameters()]
            found.append((attributes, torch.cat(weights)))
    return found


def test_ddp_options_reach_ddp_and_only_a_comm_hook_changes_weights(tmp_path: Path):
    found, _ = run_distributed(train, 2, tmp_path)
    for options, (attributes, weights) in zip(OPTIONS, found, strict=True):
        expected = DDPOptions(**options).model_dump()
        rounds = expected.pop("comm_hook") != "no"
        assert attributes == expected
        largest = (weights - found[0][1]).abs().max()
        assert (1e-6 < largest < 0.02) if rounds else largest < 1e-6, options


class WithBuffers(nn.Module):
    constant_buffers = ("table",)

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("table", torch.full((2,), float(dist.get_rank())))
        self.register_buffer("count", torch.full((2,), float(dist.get_rank())))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def buffers_after_a_step() -> tuple[list[float], list[float]]:
    model = nn.Sequential(WithBuffers())
    wrapped, _ = prepare(Accelerator(cpu=True), model, torch.optim.SGD(model.parameters(), lr=0.1))
    wrapped(torch.ones(2)).sum().backward()
    return model[0].table.tolist(), model[0].count.tolist()


def test_ddp_broadcasts_buffers_except_constant_ones():
    assert run_distributed(buffers_after_a_step, 2) == [([0, 0], [0, 0]), ([1, 1], [0, 0])]
