"""What only a GPU shows: precisions, loss scaling, compiled kernels, CUDA graphs, NCCL. `make test-gpu` runs it there.

What can be tried on a CPU is tried there in every run of the suite, as a rehearsal. More runs on a GPU with it: the
layer, the recipes and transformers' Trainer (`test_device.py`), and the matrix of layouts (`test_parity.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.gpu import has_grouped_kernel, skip_without_gpus, use_gpu
from tests.support.helpers import run_distributed
from toolkit.data.batches import TrainBatches
from toolkit.data.table import TensorTable
from toolkit.experts.layer.losses import RouterPenalty
from toolkit.experts.layer.moe_layer import make_moe
from toolkit.experts.parallel.groups import make_expert_groups
from toolkit.run.config.callback_options import CheckpointOptions
from toolkit.run.config.experts import MoERunConfig
from toolkit.run.run import Run, start_run
from toolkit.train.callbacks.base import Callback
from toolkit.train.callbacks.checkpointing import Checkpointing
from toolkit.train.callbacks.expert_load import ExpertLoad
from toolkit.train.models.mlp import Pixels, ResidualClassifier
from toolkit.train.optim import build_optimizer, constant
from toolkit.train.tasks.classification import Classification
from toolkit.train.trainer import Trainer

on_a_gpu = pytest.mark.gpu
compiles = pytest.mark.filterwarnings("ignore")
"""torch's compiler warns of its own calls, and where another dtype or kernel would be faster."""
DEVICES = ["cpu", pytest.param("cuda", marks=on_a_gpu)]
STEPS = 20


class Losses(Callback):
    """The loss of each step."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_step_end(self, trainer: Trainer) -> None:
        self.found.append(trainer.sums.compute()["loss"])
        trainer.sums.reset()


@contextmanager
def training(
    folder: Path, device: str, *callbacks: Callback, mixed_precision: str = "no", **settings: Any
) -> Iterator[Trainer]:
    """Twenty steps of a mixture of eight experts, on all processes, on a few random images of four classes."""
    # Accelerate offers fp16 on GPUs only: on a CPU it gets what it would have there.
    rehearses_fp16 = mixed_precision == "fp16" and device == "cpu"
    config = MoERunConfig(
        cpu=device == "cpu",
        mixed_precision="no" if rehearses_fp16 else mixed_precision,  # type: ignore[arg-type]
        tracker="none",
        run_dir=folder,
        **settings,
    )
    with start_run("gpu", config) as run:
        if rehearses_fp16:
            rehearse_fp16(run)
        torch.manual_seed(0)
        layer = make_moe(64, 128, 8, 2, groups=make_expert_groups(run.world_size))
        model = ResidualClassifier(Pixels(0.5, 0.5), layer, num_pixels=64, dim=64, num_classes=4)
        penalty = RouterPenalty(model, balance_weight=0.01)
        draws = torch.Generator().manual_seed(0)
        table = TensorTable(
            input=torch.randint(256, (256, 8, 8), dtype=torch.uint8, generator=draws),
            label=torch.randint(4, (256,), generator=draws),
        )
        yield Trainer(
            run,
            Classification(penalty=penalty),
            model,
            build_optimizer(model, config.replace(lr=1e-3)),
            TrainBatches(table, batch_size=64, seed=0, rank=run.rank, world_size=run.world_size, device=run.device),
            max_steps=STEPS,
            schedule=constant(),
            log_every=STEPS,
            callbacks=[ExpertLoad(model), *callbacks],
        )


def rehearse_fp16(run: Run) -> None:
    state: Any = run.accelerator.state
    state._mixed_precision = "fp16"
    run.accelerator.native_amp = True
    run.accelerator.scaler = torch.amp.GradScaler("cpu")


def losses_of(folder: Path, device: str, **settings: Any) -> list[float]:
    losses = Losses()
    with training(folder, device, losses, **settings) as trainer:
        assert trainer.run.device.type == device
        trainer.fit()
        assert all(parameter.isfinite().all() for parameter in trainer.parameters)
    assert len(losses.found) == STEPS
    return losses.found


# --- precisions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mixed_precision", ["bf16", "fp16"])
def test_half_precision_learns_what_float32_learns(tmp_path: Path, mixed_precision: str, device: str):
    exact = losses_of(tmp_path / "no", device)
    half = losses_of(tmp_path / mixed_precision, device, mixed_precision=mixed_precision)
    assert exact[-1] < exact[0] - 0.05
    assert half != exact
    torch.testing.assert_close(torch.tensor(half), torch.tensor(exact), rtol=0.05, atol=0.02)


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_whose_scaled_gradients_overflow_is_skipped_and_the_scale_halved(tmp_path: Path, device: str):
    with training(tmp_path, device, mixed_precision="fp16") as trainer:
        scaler = trainer.run.accelerator.scaler
        scaler.load_state_dict(scaler.state_dict() | {"scale": 2.0**40})
        steps = trainer.batches.steps(0)
        before = [parameter.detach().clone() for parameter in trainer.parameters]
        trainer.train_step(next(steps))
        assert scaler.get_scale() == 2.0**39
        assert all(map(torch.equal, trainer.parameters, before))
        for _ in range(40):  # until it fits
            trainer.train_step(next(steps))
        assert scaler.get_scale() < 2.0**30
        assert not any(map(torch.equal, trainer.parameters, before))
        assert all(parameter.isfinite().all() for parameter in trainer.parameters)


@pytest.mark.parametrize("device", DEVICES)
def test_a_continued_run_has_the_scale_of_the_checkpoint(tmp_path: Path, device: str):
    with training(tmp_path / "first", device, mixed_precision="fp16") as trainer:
        trainer.run.accelerator.scaler.load_state_dict(trainer.run.accelerator.scaler.state_dict() | {"scale": 512.0})
        trainer.train_step(next(trainer.batches.steps(0)))
        folder = trainer.save()
        weights = [parameter.detach().clone() for parameter in trainer.parameters]
    with training(tmp_path / "second", device, mixed_precision="fp16") as trainer:
        assert folder is not None
        trainer.restore(folder)
        assert trainer.run.accelerator.scaler.get_scale() == 512.0
        assert trainer.state.step == 1
        assert all(map(torch.equal, trainer.parameters, weights))


# --- kernels --------------------------------------------------------------------------------------------------------


@on_a_gpu
@compiles
@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("mixed_precision", ["no", "bf16", "fp16"])
def test_a_compiled_model_learns_what_it_learns_without(tmp_path: Path, mixed_precision: str):
    curves = []
    for compiled in (False, True):
        losses = Losses()
        with training(tmp_path / str(compiled), "cuda", losses, mixed_precision=mixed_precision) as trainer:
            if compiled:
                trainer.raw_model.compile()
            trainer.fit()
        curves.append(torch.tensor(losses.found))
    torch.testing.assert_close(*curves, rtol=1e-4 if mixed_precision == "no" else 0.05, atol=1e-4)
    torch.compiler.reset()


@on_a_gpu
@compiles
def test_dense_parts_can_be_cuda_graphs_beside_a_layer():
    torch.manual_seed(0)
    layer = make_moe(64, 128, 8, 2, activation="swiglu").cuda()
    stem, head = (torch.nn.Linear(64, 64).cuda() for _ in range(2))
    model = torch.nn.Sequential(stem, layer, head)
    graphs = torch.nn.Sequential(*(torch.compile(each, mode="reduce-overhead") for each in (stem, head)))
    graphs.insert(1, layer)
    torch._dynamo.utils.counters.clear()
    for step in range(6):
        x = torch.randn(200, 64, device="cuda", generator=torch.Generator("cuda").manual_seed(step))
        torch.compiler.cudagraph_mark_step_begin()
        found, expected = (
            torch.autograd.grad(each(x).square().sum(), list(model.parameters())) for each in (graphs, model)
        )
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0
    torch.compiler.reset()


@on_a_gpu
def test_an_ordinary_step_never_waits_for_the_gpu(tmp_path: Path):
    if not has_grouped_kernel():
        pytest.skip("torch multiplies expert by expert on this GPU, and reads where each one's rows end")
    with training(tmp_path, "cuda", mixed_precision="bf16") as trainer:
        steps = trainer.batches.steps(0)
        for _ in range(2):  # the epoch has four steps, and a line of metrics follows its last
            trainer.train_step(next(steps))
        batches = next(steps)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            trainer.train_step(batches)
        finally:
            torch.cuda.set_sync_debug_mode("default")


# --- checkpoints ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_a_checkpoint_that_is_written_while_training_goes_on_has_the_weights_of_its_step(tmp_path: Path, device: str):
    weights = []
    for in_background in (False, True):
        save = Checkpointing(CheckpointOptions(every_steps=8, keep=3, in_background=in_background))
        with training(tmp_path / str(in_background), device, save) as trainer:
            trainer.fit()
            folder = trainer.run.checkpoints / "step-00000008"
            weights.append(
                {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}
            )
    torch.testing.assert_close(weights[1], weights[0], rtol=0 if device == "cpu" else 1e-4, atol=1e-6)


# --- NCCL -----------------------------------------------------------------------------------------------------------


def compare_layouts(folder: Path) -> None:
    use_gpu()
    curves = [
        losses_of(folder / dense, "cuda", mixed_precision="bf16", dense_parallel=dense) for dense in ("ddp", "fsdp2")
    ]
    torch.testing.assert_close(torch.tensor(curves[1]), torch.tensor(curves[0]), rtol=0.02, atol=0.02)


@on_a_gpu
@pytest.mark.parametrize("processes", [1, 2])
def test_ddp_and_fsdp2_train_under_nccl(tmp_path: Path, processes: int):
    skip_without_gpus(processes)
    run_distributed(compare_layouts, processes, tmp_path)
