"""Precisions, loss scaling, compiled kernels, CUDA graphs and NCCL on a GPU: `make test-gpu`.

Some tests also run on the CPU as a rehearsal. `test_device.py` runs the layer and the recipes on a GPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import toolkit as tk
from benchmarks.support.processes import run_distributed
from tests.support.gpu import has_grouped_kernel, skip_without_gpus, use_gpu
from tests.support.trainers import in_hook
from toolkit.data.batches import TrainBatches
from toolkit.run.config.callback_options import CheckpointOptions
from toolkit.train.callbacks.checkpointing import Checkpointing
from toolkit.train.callbacks.expert_load import ExpertLoad
from toolkit.train.optim import constant

needs_gpu = pytest.mark.gpu
compiles = pytest.mark.filterwarnings("ignore")
"""Ignores warnings of torch's compiler about its own calls and faster kernels."""
on_each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
STEPS = 20


@contextmanager
def training(
    folder: Path, device: str, *callbacks: tk.Callback, mixed_precision: str = "no", **settings: Any
) -> Iterator[tk.Trainer]:
    """Yield a trainer of eight experts, sharded over all ranks, on random images of four classes."""
    # Accelerate supports fp16 on GPUs only.
    rehearses_fp16 = mixed_precision == "fp16" and device == "cpu"
    precision = "no" if rehearses_fp16 else mixed_precision
    config = tk.MoERunConfig(
        cpu=device == "cpu", mixed_precision=precision, tracker="none", run_dir=folder, lr=1e-3, **settings
    )
    with tk.start_run("gpu", config) as run:
        if rehearses_fp16:
            run.accelerator.state._mixed_precision = "fp16"
            run.accelerator.native_amp = True
            run.accelerator.scaler = torch.amp.GradScaler("cpu")
        torch.manual_seed(0)
        layer = tk.experts.make_moe(64, 128, 8, 2, groups=tk.experts.make_expert_groups(run.world_size))
        model = tk.ResidualClassifier(tk.Pixels(0.5, 0.5), layer, num_pixels=64, dim=64, num_classes=4)
        draws = torch.Generator().manual_seed(0)
        table = tk.TensorTable(
            input=torch.randint(256, (256, 8, 8), dtype=torch.uint8, generator=draws),
            label=torch.randint(4, (256,), generator=draws),
        )
        yield tk.Trainer(
            run,
            tk.Classification(penalty=tk.experts.RouterPenalty(model, balance_weight=0.01)),
            model,
            tk.build_optimizer(model, config),
            TrainBatches(table, batch_size=64, seed=0, rank=run.rank, world_size=run.world_size, device=run.device),
            max_steps=STEPS,
            schedule=constant(),
            log_every=STEPS,
            callbacks=[ExpertLoad(), *callbacks],
        )


def losses_of(folder: Path, device: str, *, compile: bool = False, **settings: Any) -> torch.Tensor:
    losses: list[float] = []

    def record(trainer: tk.Trainer) -> None:
        losses.append(trainer.sums.compute()["loss"])
        trainer.sums.reset()

    with training(folder, device, in_hook("on_step_end", record), **settings) as trainer:
        assert trainer.run.device.type == device
        if compile:
            trainer.raw_model.compile()
        trainer.fit()
        assert all(parameter.isfinite().all() for parameter in trainer.parameters)
    assert len(losses) == STEPS
    return torch.tensor(losses)


@on_each_device
@pytest.mark.parametrize("mixed_precision", ["bf16", "fp16"])
def test_half_precision_follows_float32(tmp_path: Path, mixed_precision: str, device: str):
    exact = losses_of(tmp_path / "no", device)
    half = losses_of(tmp_path / mixed_precision, device, mixed_precision=mixed_precision)
    assert exact[-1] < exact[0] - 0.05
    assert not torch.equal(half, exact)
    torch.testing.assert_close(half, exact, rtol=0.05, atol=0.02)


@on_each_device
def test_gradient_overflow_skips_the_step_and_halves_the_scale(tmp_path: Path, device: str):
    with training(tmp_path, device, mixed_precision="fp16") as trainer:
        scaler = trainer.run.accelerator.scaler
        scaler.load_state_dict(scaler.state_dict() | {"scale": 2.0**40})
        steps = trainer.batches.steps(0)
        before = [parameter.detach().clone() for parameter in trainer.parameters]
        trainer.train_step(next(steps))
        assert scaler.get_scale() == 2.0**39
        assert all(map(torch.equal, trainer.parameters, before))
        for _ in range(40):
            trainer.train_step(next(steps))
        assert scaler.get_scale() < 2.0**30
        assert not any(map(torch.equal, trainer.parameters, before))
        assert all(parameter.isfinite().all() for parameter in trainer.parameters)


@needs_gpu
@compiles
@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("mixed_precision", ["no", "bf16", "fp16"])
def test_compiled_model_equals_the_uncompiled_model(tmp_path: Path, mixed_precision: str):
    expected, found = (
        losses_of(tmp_path / str(compile), "cuda", mixed_precision=mixed_precision, compile=compile)
        for compile in (False, True)
    )
    torch.testing.assert_close(found, expected, rtol=1e-4 if mixed_precision == "no" else 0.05, atol=1e-4)
    torch.compiler.reset()


@needs_gpu
@compiles
def test_dense_modules_next_to_a_moe_layer_run_as_cuda_graphs():
    torch.manual_seed(0)
    layer = tk.experts.make_moe(64, 128, 8, 2, activation="swiglu").cuda()
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


@needs_gpu
def test_ordinary_step_never_waits_for_the_gpu(tmp_path: Path):
    if not has_grouped_kernel():
        pytest.skip("torch multiplies expert by expert on this GPU, and reads the end of each expert's rows")
    with training(tmp_path, "cuda", mixed_precision="bf16") as trainer:
        steps = trainer.batches.steps(0)
        for _ in range(2):  # the epoch has four steps, and the last one is a log step
            trainer.train_step(next(steps))
        batches = next(steps)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            trainer.train_step(batches)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@on_each_device
def test_checkpoints_written_in_the_background_equal_those_written_at_once(tmp_path: Path, device: str):
    tensors = []
    for in_background in (False, True):
        save = Checkpointing(CheckpointOptions(every_steps=8, keep=3, in_background=in_background))
        with training(tmp_path / str(in_background), device, save) as trainer:
            trainer.fit()
            files = sorted(trainer.run.checkpoints.rglob("*.safetensors"))
            tensors.append([load_file(file) for file in files])
    close = {"rtol": 0, "atol": 0} if device == "cpu" else {"rtol": 1e-4, "atol": 1e-6}
    torch.testing.assert_close(tensors[1], tensors[0], **close)


def compare_fsdp2_with_ddp(folder: Path) -> None:
    use_gpu()
    ddp, fsdp2 = (
        losses_of(folder / dense, "cuda", mixed_precision="bf16", dense_parallel=dense) for dense in ("ddp", "fsdp2")
    )
    torch.testing.assert_close(fsdp2, ddp, rtol=0.02, atol=0.02)


@needs_gpu
@pytest.mark.parametrize("processes", [1, 2])
def test_fsdp2_equals_ddp_under_nccl(tmp_path: Path, processes: int):
    skip_without_gpus(processes)
    run_distributed(compare_fsdp2_with_ddp, processes, tmp_path)
