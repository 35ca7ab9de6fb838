"""A LightningModule with the base class of docs/experts/torch_alone.md on two processes equals one process."""

import os
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.support.processes import ROOT, run_distributed
from tests.foreign.toy import build, points
from tests.parity.layouts import place
from tests.support.equality import assert_equal_rows
from toolkit.experts.state.state_dict import whole_state_dict

PAGE = (ROOT / "docs" / "experts" / "torch_alone.md").read_text()
(CLASS,) = re.findall(r"```python lightning\n(.*?)```", PAGE, re.DOTALL)


def train(accumulation: int) -> dict[str, Tensor]:
    """Return weights after steps with clipping."""
    from lightning import LightningModule, Trainer
    from lightning.fabric.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch.strategies import DDPStrategy

    world = dist.get_world_size() if dist.is_initialized() else 1
    page: dict[str, Any] = {"ExpertModule": LightningModule, "place": lambda _, *sizes: place("replicas", *sizes)}
    if world > 1:  # with replicas, which need every call of the page
        exec(CLASS.replace("shard_experts(self)", "shard_experts(self, placement=place)"), page)

    class Classifier(page["ExpertModule"]):
        def __init__(self) -> None:
            super().__init__()
            self.model, *_ = build()

        def training_step(self, batch: Any, _: int) -> Tensor:
            x, y = (part.chunk(world)[self.global_rank] for part in batch)
            return cross_entropy(self.model(x), y)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    module = Classifier()
    strategy = DDPStrategy(cluster_environment=TorchElasticEnvironment(), process_group_backend="gloo")
    silent = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = Trainer(
        accelerator="cpu",
        devices=world,
        strategy=strategy if world > 1 else "auto",
        max_steps=3,
        gradient_clip_val=0.3,
        accumulate_grad_batches=accumulation,
        use_distributed_sampler=False,
        **dict.fromkeys(silent, False),
    )
    trainer.fit(module, points(batch_size=8))
    return whole_state_dict(module.model)


def train_all() -> list[dict[str, Tensor]]:
    os.environ |= {"TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": "0"}  # Lightning uses the existing process group
    return [train(accumulation) for accumulation in (1, 2)]


def test_lightning_module_on_two_processes_equals_one_process():
    pytest.importorskip("lightning")
    (reference,), (found, _) = run_distributed(train_all, 1), run_distributed(train_all, 2)
    for expected, weights in zip(reference, found, strict=True):
        assert_equal_rows(weights, expected, 1e-10)
