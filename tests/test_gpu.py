"""What only a GPU can show. `make test-gpu` runs these; the default suite leaves them out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from toolkit.config.experts import MoERunConfig
from toolkit.data.batches import TrainBatches
from toolkit.data.table import TensorTable
from toolkit.models.mlp import Pixels, ResidualClassifier
from toolkit.moe.layer import make_moe
from toolkit.moe.load.expert_load import ExpertLoad
from toolkit.moe.losses import RouterPenalty
from toolkit.optim import build_optimizer, constant
from toolkit.run.run import start_run
from toolkit.tasks.classification import Classification
from toolkit.trainer import Trainer

pytestmark = pytest.mark.gpu


def make_trainer(folder: Path, mixed_precision: str, steps: int) -> Trainer:
    config = MoERunConfig(mixed_precision=mixed_precision, tracker="none", run_dir=folder)  # type: ignore[arg-type]
    run = start_run("gpu", config)
    model = ResidualClassifier(Pixels(0.5, 0.5), make_moe(64, 128, 8, 2), num_pixels=64, dim=64, num_classes=4)
    penalty = RouterPenalty(model, balance_weight=0.01)
    draws = torch.Generator().manual_seed(0)
    table = TensorTable(
        input=torch.randint(256, (4096, 8, 8), dtype=torch.uint8, generator=draws),
        label=torch.randint(4, (4096,), generator=draws),
    )
    return Trainer(
        run,
        Classification(penalty=penalty),
        model,
        build_optimizer(model, lr=1e-3, config=config.optimizer),
        TrainBatches(table, batch_size=64, seed=0, device=run.device),
        max_steps=steps,
        schedule=constant(),
        log_every=steps,
        callbacks=[ExpertLoad(model)],
    )


def test_the_layer_gives_on_a_gpu_what_it_gives_on_a_cpu():
    layer = make_moe(64, 128, 8, 2, activation="swiglu").double()
    x = torch.randn(200, 64, dtype=torch.float64, requires_grad=True)
    layer(x).square().sum().backward()
    expected = [x.grad.clone(), *(p.grad.clone() for p in layer.parameters())]
    layer.zero_grad()
    layer.cuda()
    y = x.detach().cuda().requires_grad_()
    layer(y).square().sum().backward()
    for found, wanted in zip([y.grad, *(p.grad for p in layer.parameters())], expected, strict=True):
        torch.testing.assert_close(found.cpu(), wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("mixed_precision", ["no", "bf16", "fp16"])
def test_training_works_in_every_precision(tmp_path: Path, mixed_precision: str):
    trainer = make_trainer(tmp_path, mixed_precision, steps=20)
    assert trainer.run.device.type == "cuda"
    trainer.fit()
    assert trainer.state.step == 20
    assert all(p.isfinite().all() for p in trainer.parameters)
    trainer.run.close()


def test_an_ordinary_step_never_waits_for_the_gpu(tmp_path: Path):
    trainer = make_trainer(tmp_path, "bf16", steps=1000)
    steps = trainer.batches.steps(0)
    for _ in range(3):
        trainer.train_step(next(steps))
    batches = next(steps)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        trainer.train_step(batches)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    trainer.run.close()
