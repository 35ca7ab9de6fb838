"""Training on a device other than the CPU mixes no devices, and ordinary steps do not wait for the device.

`tests.support.emulated_device` shows this without a GPU; `make test-gpu` uses a GPU.
"""

import contextlib
import importlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import toolkit as tk
from benchmarks.support.processes import run_distributed
from tests.integrations.peft.models import adapted, base
from tests.integrations.transformers.trainers import make, quiet_float64
from tests.recipes.test_lm_moe import corpus
from tests.support.emulated_device import EmulatedDevice, emulate
from tests.support.gpu import Gpu, use_gpu
from toolkit.experts.layer.router_options import RouterOptions
from toolkit.experts.parallel.replica_check import FIRST_STEPS
from toolkit.experts.parallel.sync import ExpertSync
from toolkit.run.cli import parse

DEVICES = ["emulated", pytest.param("gpu", marks=pytest.mark.gpu)]
Device = EmulatedDevice | Gpu


def use(name: str) -> Device:
    return emulate() if name == "emulated" else use_gpu()


def mix_devices() -> None:
    with emulate() as device:
        here, there = torch.ones(3, device=device.device), torch.ones(3)
        for operation in (lambda: here + there, lambda: there.add_(here)):
            with pytest.raises(RuntimeError, match="expected all tensors on one device"):
                operation()
        with pytest.raises(TypeError, match="no array"):
            here.numpy()


def test_emulated_device_rejects_mixed_devices():
    run_distributed(mix_devices, 1)


ROUTERS = [{}, {"balance": "bias"}, {"router_score": "sigmoid"}, {"router_normalize": False}]
LAYERS: list[dict[str, Any]] = [
    *({"router": RouterOptions(**options)} for options in ROUTERS),
    *(
        {"activation": activation, "recompute": recompute}
        for activation, recompute in itertools.product(["relu", "swiglu"], ["none", "selective", "full"])
    ),
    {"capacity_factor": 1.0},
]


def outputs_and_gradients(layer: nn.Module, x: Tensor) -> list[Tensor]:
    layer.zero_grad()
    x.grad = None
    balanced_by_loss = layer.router.options.balance == "loss"
    penalty = tk.experts.RouterPenalty(layer, balance_weight=0.01 if balanced_by_loss else 0.0, z_weight=0.01)
    y = layer(x)
    (y.square().sum() + penalty()).backward()
    gradients = [parameter.grad for parameter in (x, *layer.parameters())]
    # Clones, because moving a layer to a device moves its gradients too.
    return [y.detach(), *(gradient.clone() for gradient in gradients if gradient is not None)]


def compare_layers(name: str, processes: int) -> None:
    device = use(name)
    torch.manual_seed(0)
    x = torch.randn(2, 32, 16, requires_grad=True)
    layers = [tk.experts.make_moe(16, 32, 8, 2, **settings) for settings in LAYERS]
    expected = [outputs_and_gradients(layer, x) for layer in layers]
    # A GPU adds in a different order.
    close = {"rtol": 0, "atol": 0} if name == "emulated" else {"rtol": 1e-3, "atol": 1e-4}
    with device:
        there = x.detach().to(device.device).requires_grad_()
        for settings, layer, values in zip(LAYERS, layers, expected, strict=True):
            layer.to(device.device)
            outputs_and_gradients(layer, there)  # the first call moves some tables to the device
            device.waits.clear()
            found = outputs_and_gradients(layer, there)
            # With a capacity, the number of remaining rows is read, and with several processes their number of rows.
            waits = 0 if "capacity_factor" not in settings else 1 if processes == 1 else 2
            assert len(device.waits) == waits, (settings, device.waits)
            torch.testing.assert_close([value.cpu() for value in found], values, **close)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("processes", [1, 2])
def test_layer_on_a_device_equals_the_cpu_and_does_not_wait(processes: int, device: str):
    run_distributed(compare_layers, processes, device, processes)


@dataclass
class Waits:
    """Places in the toolkit that wait for the device in ordinary steps."""

    steps: int = 0
    in_steps: list[str] = field(default_factory=list)
    after_steps: list[str] = field(default_factory=list)
    """Waits while experts are rebalanced, and in the hook `on_step_end` of callbacks."""


def watch_steps(device: Device) -> Waits:
    """Record the waits of all trainers of this process."""
    train_step, call_hooks, found = tk.Trainer.train_step, tk.Trainer.call_hooks, Waits()
    rebalance, rebalancing = ExpertSync.after_step, list[Any]()
    ordinary = False

    def places(begin: int) -> list[str]:
        return [wait.place for wait in device.waits[begin:] if wait.place.startswith("toolkit/")] if ordinary else []

    def watched_step(trainer: tk.Trainer, micro_batches: Any) -> None:
        nonlocal ordinary
        begin, after_log_step = len(device.waits), trainer.at_log_step  # a log step may be followed by a checkpoint
        train_step(trainer, micro_batches)
        # DDP orders its buckets in the first two steps, and replicas are checked in a few more.
        ordinary = not (after_log_step or trainer.at_log_step) and trainer.state.step > FIRST_STEPS
        found.steps += ordinary
        found.in_steps += places(begin)
        device.waits += rebalancing
        found.after_steps += places(len(device.waits) - len(rebalancing))
        rebalancing.clear()

    def watched_rebalance(sync: ExpertSync, *args: Any) -> None:
        begin = len(device.waits)
        rebalance(sync, *args)
        rebalancing.extend(device.waits[begin:])
        del device.waits[begin:]

    def watched_hooks(trainer: tk.Trainer, name: str, *args: Any) -> None:
        begin = len(device.waits)
        call_hooks(trainer, name, *args)
        if name == "on_step_end":
            found.after_steps += places(begin)

    tk.Trainer.train_step, tk.Trainer.call_hooks, ExpertSync.after_step = watched_step, watched_hooks, watched_rebalance
    return found


def numbers_and_waits(name: str | None, train: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any], Waits]:
    """Return the results of `train` on device `name` (None is the CPU) that do not depend on time, and its waits."""
    if name is None:
        results, waits = train(), Waits()
    else:
        device = use(name)
        waits = watch_steps(device)
        with device:
            results = train()
    kept = {n: v for n, v in results.items() if n.startswith(("test", "min_expert", "max_expert"))}
    return {n: v for n, v in kept.items() if not isinstance(v, list)}, waits


def train_recipe(recipe: str, flags: list[str], folder: Path, name: str | None = None) -> tuple[dict[str, Any], Waits]:
    module = importlib.import_module(f"recipes.{recipe}")
    config = parse(module.PRESETS, [*flags, "--tracker", "none", "--run-dir", str(folder)])
    return numbers_and_waits(name, lambda: module.main(config))


def dim(batch: dict[str, Tensor], visits: Tensor) -> dict[str, Tensor]:
    """Darken each image by up to a half, depending on its sample access."""
    brightness = 1 - (visits * 2654435769 >> 7) % 1000 / 2000
    return {**batch, "input": (batch["input"] * brightness[:, None, None]).to(torch.uint8)}


def train_on_images(folder: Path, name: str | None) -> tuple[dict[str, Any], Waits]:
    """Train a dense network on augmented images."""
    labels = torch.arange(400) % 10
    pixels = torch.randint(100, (400, 28, 28), generator=torch.Generator().manual_seed(0))
    pixels[torch.arange(400), 2 * labels + 4] += 100
    table = tk.TensorTable(input=pixels.to(torch.uint8), label=labels)
    config = tk.RunConfig(
        run_dir=folder, tracker="none", cpu=name != "gpu", batch_size=8, lr=3e-3, log_every=10, max_steps=50
    )

    def train() -> dict[str, Any]:
        with tk.start_run("images", config) as run:
            model = nn.Sequential(tk.Pixels(mean=0.2, std=0.15), tk.MLP(28 * 28, 32, 10))
            optimizer, data = tk.build_optimizer(model, config), tk.Splits(table, table)
            return tk.fit(run, tk.Classification(), model, optimizer, data, augment=dim)

    return numbers_and_waits(name, train)


DYNAMIC = "--max-experts 8 --max-steps 26 --lifecycle.grow-every 10 --lifecycle.sleep-every 20 --lifecycle.min-age 5"
MOVING = "--replan.planner replicate --replan.every 5 --replan.no-guarded --spare-slots 2"
RECIPES = [
    ("mnist_moe", 1, f"debug {DYNAMIC} --gradient-accumulation-steps 2", 0),
    ("mnist_moe", 2, f"debug {MOVING} --max-steps 18", 1),
    ("lm_moe", 2, "debug --max-steps 18 --dataset folder", 2),
]
"""Recipe, processes, flags, and layers with experts on several processes."""
ON_GPUS_ONLY = [(name, 1, "debug", 0) for name in ("few_labels", "finetune_moe", "har", "lmu_speech", "vae_robustness")]
"""Recipes with other GPU kernels, which the emulated device does not have."""


@pytest.mark.parametrize(
    ("recipe", "processes", "flags", "layers", "device"),
    [
        *((*case, "emulated") for case in RECIPES),
        *(pytest.param(*case, "gpu", marks=pytest.mark.gpu) for case in RECIPES + ON_GPUS_ONLY),
    ],
)
def test_recipe_on_a_device_equals_the_cpu_and_waits_only_in_all_to_alls(
    tmp_path: Path, recipe: str, processes: int, flags: str, layers: int, device: str
):
    words = flags.split()
    if recipe == "lm_moe":
        words += ["--data-dir", str(corpus(tmp_path / "corpus"))]
    expected, _ = run_distributed(train_recipe, processes, recipe, words, tmp_path / "cpu")[0]
    found, waits = run_distributed(train_recipe, processes, recipe, words, tmp_path / "device", device)[0]
    assert expected
    if device == "gpu":  # which adds in a different order, so that a few predictions differ
        assert found == pytest.approx(expected, rel=0.1, abs=0.05)
    else:  # attention has a different kernel on the CPU
        assert found == (pytest.approx(expected, rel=1e-5) if recipe == "lm_moe" else expected)
    assert waits.steps > 4
    if recipe != "lmu_speech":  # torch's CTC loss reads the lengths on the host
        # An all-to-all reads its sizes on the host.
        assert waits.in_steps == ["toolkit/experts/layer/dispatcher.py"] * layers * waits.steps
    # Plans and growth read loads and change weights.
    assert bool(waits.after_steps) == (DYNAMIC in flags or MOVING in flags)


@pytest.mark.parametrize("device", DEVICES)
def test_augmented_training_on_a_device_equals_the_cpu_and_does_not_wait(tmp_path: Path, device: str):
    expected, _ = run_distributed(train_on_images, 1, tmp_path / "cpu", None)[0]
    found, waits = run_distributed(train_on_images, 1, tmp_path / "device", device)[0]
    close = {"rtol": 0, "atol": 0} if device == "emulated" else {"rtol": 0.1, "atol": 0.1}
    assert expected
    torch.testing.assert_close(found, expected, **close)
    assert waits.steps > 30
    assert waits.in_steps == waits.after_steps == []


def train_in_transformers(folder: Path, name: str | None) -> list[tuple[float, float]]:
    """Return loss and gradient norm of each step of full and LoRA fine-tuning with migrations."""
    curves = []
    with contextlib.nullcontext() if name is None else use(name), quiet_float64():
        for model in (base("qwen3_moe"), adapted("qwen3_moe")):
            replan = {"replan": tk.experts.ReplanOptions(planner="lpt", every=1, guarded=False)}
            # A search for unused parameters copies to the device in a thread that the emulation does not see.
            options = {"use_cpu": name != "gpu", "ddp_find_unused_parameters": False}
            trainer = make("Trainer", folder, model, options=replan, **options)
            trainer.train()
            curves += [(line["loss"], line["grad_norm"]) for line in trainer.state.log_history if "loss" in line]
            assert len(trainer.experts.migrations) > 0
    return curves


@pytest.mark.parametrize("device", DEVICES)
def test_transformers_trainer_on_a_device_equals_the_cpu(tmp_path: Path, device: str):
    on_cpu = run_distributed(train_in_transformers, 2, tmp_path, None)[0]
    on_device = run_distributed(train_in_transformers, 2, tmp_path, device)[0]
    assert len(on_cpu) > 4
    torch.testing.assert_close(torch.tensor(on_device), torch.tensor(on_cpu), rtol=1e-9, atol=0)
