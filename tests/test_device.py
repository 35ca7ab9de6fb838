"""The toolkit on a device that is not the CPU: no operation mixes devices, and ordinary steps do not wait for it.

The device is emulated (`tests.support.emulated_device`), so that this is seen without a GPU; `make test-gpu` takes a
GPU.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import toolkit as tk
from tests.integrations.peft.models import adapted, base
from tests.integrations.transformers.trainers import make, quiet_float64
from tests.recipes.test_lm_moe import corpus
from tests.support.emulated_device import EmulatedDevice, emulate
from tests.support.gpu import Gpu, use_gpu
from tests.support.helpers import run_distributed
from toolkit.data.table import Batch
from toolkit.experts.layer.losses import RouterPenalty
from toolkit.experts.layer.moe_layer import MoE, make_moe
from toolkit.experts.layer.router_options import RouterOptions
from toolkit.experts.moving.replan_options import ReplanOptions
from toolkit.run.cli import parse
from toolkit.train.callbacks.base import Callback
from toolkit.train.trainer import Trainer

DEVICES = ["emulated", pytest.param("gpu", marks=pytest.mark.gpu)]
Device = EmulatedDevice | Gpu


def take(device: str) -> Device:
    return emulate() if device == "emulated" else use_gpu()


def broken_rules() -> None:
    with emulate() as device:
        here, there = torch.ones(3, device=device.device), torch.ones(3)
        with pytest.raises(RuntimeError, match="expected all tensors on one device"):
            here + there
        with pytest.raises(RuntimeError, match="expected all tensors on one device"):
            there.add_(here)
        with pytest.raises(TypeError, match="has no array"):
            here.numpy()
        here += torch.tensor(2.0)
        assert device.waits == []
        waiting = [
            lambda: here.sum().item(),
            lambda: here.tolist(),
            lambda: bool((here > 2).all()),
            lambda: here[here > 2],
            lambda: here[torch.tensor([0, 2])],
            lambda: here.nonzero(),
            lambda: there.to(device.device),
            lambda: torch.tensor([1.0, 2.0], device=device.device),
        ]
        for number, wait in enumerate(waiting, 1):
            wait()
            assert len(device.waits) == number, device.waits
        here.to("cpu", non_blocking=True)
        torch.arange(3, device=device.device).repeat_interleave(torch.arange(3, device=device.device), output_size=3)
        assert len(device.waits) == len(waiting)
        assert {wait.place for wait in device.waits} == {""}


def test_the_emulated_device_refuses_and_notes_what_a_gpu_would():
    run_distributed(broken_rules, 1)


ROUTERS = [
    {},
    {"balance": "bias"},
    {"router_score": "sigmoid"},
    {"router_normalize": False},
]
LAYERS: list[dict[str, Any]] = [
    *({"router": RouterOptions(**options)} for options in ROUTERS),  # type: ignore[arg-type]
    *(
        {"activation": activation, "recompute": recompute}
        for activation, recompute in itertools.product(["relu", "swiglu"], ["none", "selective", "full"])
    ),
    {"capacity_factor": 1.0},
]


def outputs_and_gradients(layer: MoE, x: Tensor) -> list[Tensor]:
    layer.zero_grad()
    x.grad = None
    balanced_by_loss = layer.router.options.balance == "loss"
    penalty = RouterPenalty(layer, balance_weight=0.01 if balanced_by_loss else 0.0, z_weight=0.01)
    y = layer(x)
    share = penalty()
    assert share is not None
    (y.square().sum() + share).backward()
    gradients = [parameter.grad for parameter in (x, *layer.parameters())]
    # Copies, because a layer that goes to a device takes its gradients along.
    return [y.detach(), *(gradient.clone() for gradient in gradients if gradient is not None)]


def compare_layers(name: str, processes: int) -> None:
    device = take(name)
    torch.manual_seed(0)
    x = torch.randn(2, 32, 16, requires_grad=True)
    layers = [make_moe(16, 32, 8, 2, **settings) for settings in LAYERS]
    expected = [outputs_and_gradients(layer, x) for layer in layers]
    with device:
        there = x.detach().to(device.device).requires_grad_()
        for settings, layer, wanted in zip(LAYERS, layers, expected, strict=True):
            layer.to(device.device)
            outputs_and_gradients(layer, there)  # the first time some tables go to the device
            device.waits.clear()
            found = outputs_and_gradients(layer, there)
            # With a capacity, the number of rows that are left is read; by weights, first that of all processes' rows.
            gathers = "capacity_factor" in settings and processes > 1
            assert len(device.waits) == ("capacity_factor" in settings) + gathers, (settings, device.waits)
            # A GPU adds in another order.
            close = {"rtol": 0, "atol": 0} if name == "emulated" else {"rtol": 1e-3, "atol": 1e-4}
            for mine, other in zip(found, wanted, strict=True):
                torch.testing.assert_close(mine.cpu(), other, **close, msg=lambda text: f"{settings}: {text}")  # noqa: B023


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("processes", [1, 2])
def test_the_layer_computes_the_same_on_a_device_and_does_not_wait_for_it(processes: int, device: str):
    run_distributed(compare_layers, processes, device, processes)


class Watch:
    """What the host waits for in the toolkit's files in ordinary steps, after which nothing is logged: from now on."""

    def __init__(self, device: Device):
        self.device = device
        self.steps = 0
        self.in_steps: list[str] = []
        self.after_steps: list[str] = []
        """In the hook `on_step_end` of callbacks."""
        train_step, call_hooks = Trainer.train_step, Trainer.call_hooks
        watch = self

        def watched_step(trainer: Trainer, micro_batches: Any) -> None:
            begin, after_log_step = len(device.waits), trainer.at_log_step  # a checkpoint may be written after one
            train_step(trainer, micro_batches)
            # In the first two steps DDP puts its buckets in order.
            watch.is_ordinary = not (after_log_step or trainer.at_log_step) and trainer.state.step > 2
            if watch.is_ordinary:
                watch.steps += 1
                watch.in_steps += watch.places(begin)

        def watched_hooks(trainer: Trainer, name: str, *args: Any) -> None:
            begin = len(device.waits)
            call_hooks(trainer, name, *args)
            if name == "on_step_end" and watch.is_ordinary:
                watch.after_steps += watch.places(begin)

        Trainer.train_step, Trainer.call_hooks = watched_step, watched_hooks  # type: ignore[method-assign]

    def places(self, begin: int) -> list[str]:
        return [wait.place for wait in self.device.waits[begin:] if wait.place.startswith("toolkit/")]

    def found(self) -> Waits:
        return Waits(self.steps, self.in_steps, self.after_steps)


class Waits(NamedTuple):
    """Of so many ordinary steps."""

    steps: int
    in_steps: list[str]
    after_steps: list[str]


def run_recipe(
    recipe: str, flags: list[str], folder: Path, name: str | None = None
) -> tuple[dict[str, Any], Waits | None]:
    """What the run found, and where the host waited for the device `name`; None: the CPU."""
    module = importlib.import_module(f"recipes.{recipe}")
    config = parse(module.PRESETS, [*flags, "--tracker", "none", "--run-dir", str(folder)])
    if name is None:
        return plain(module.main(config)), None
    device = take(name)
    watch = Watch(device)
    with device:
        results = module.main(config)
    return plain(results), watch.found()


class Reads(Callback):
    """Reads a weight after each step."""

    def on_step_end(self, trainer: Trainer) -> None:
        trainer.parameters[0].sum().item()


def dimmed(batch: Batch, visits: Tensor) -> Batch:
    """An augmentation: each image is darker by up to a half, by as much as its visit says."""
    brightness = 1 - (visits * 2654435769 >> 7) % 1000 / 2000
    return {**batch, "input": (batch["input"] * brightness[:, None, None]).to(torch.uint8)}


def learn_images(folder: Path, name: str | None, *callbacks: Callback) -> tuple[dict[str, Any], Waits | None]:
    """As `run_recipe`, of a dense network and augmented samples."""
    device = None if name is None else take(name)
    watch = None if device is None else Watch(device)
    labels = torch.arange(400) % 10
    pixels = torch.randint(100, (400, 28, 28), generator=torch.Generator().manual_seed(0))
    pixels[torch.arange(400), 2 * labels + 4] += 100
    table = tk.TensorTable(input=pixels.to(torch.uint8), label=labels)
    config = tk.RunConfig(
        run_dir=folder, tracker="none", cpu=name != "gpu", batch_size=8, lr=3e-3, log_every=10, max_steps=50
    )
    with device or contextlib.nullcontext(), tk.start_run("images", config) as run:
        model = torch.nn.Sequential(tk.Pixels(mean=0.2, std=0.15), tk.MLP(28 * 28, 32, 10))
        results = tk.fit(
            run,
            tk.Classification(),
            model,
            tk.build_optimizer(model, config),
            tk.Splits(table, table),
            augment=dimmed,
            callbacks=callbacks,
        )
    return plain(results), None if watch is None else watch.found()


def plain(results: dict[str, Any]) -> dict[str, Any]:
    """The numbers that do not depend on time."""
    names = ("test", "min_expert", "max_expert")
    return {name: v for name, v in results.items() if name.startswith(names) and not isinstance(v, list)}


DYNAMIC = "--max-experts 8 --max-steps 26 --lifecycle.grow-every 10 --lifecycle.sleep-every 20 --lifecycle.min-age 5"
MOVING = "--replan.planner replicate --replan.every 5 --replan.no-guarded --spare-slots 2"


RECIPES = [
    ("mnist_moe", 1, f"debug {DYNAMIC} --gradient-accumulation-steps 2", 0),
    ("mnist_moe", 2, f"debug {MOVING} --max-steps 18", 1),
    ("lm_moe", 2, "debug --max-steps 12 --dataset folder", 2),
]
ON_GPUS_ONLY = [
    (recipe, 1, "debug", 0) for recipe in ("few_labels", "finetune_moe", "har", "lmu_speech", "vae_robustness")
]
"""What their steps have beside the others' is kernels, which the emulated device has not."""


@pytest.mark.parametrize(
    ("recipe", "processes", "flags", "layers", "device"),
    [
        *((*case, "emulated") for case in RECIPES),
        *(pytest.param(*case, "gpu", marks=pytest.mark.gpu) for case in RECIPES + ON_GPUS_ONLY),
    ],
)
def test_a_recipe_finds_on_a_device_what_it_finds_on_a_cpu_and_waits_only_for_all_to_alls(
    tmp_path: Path, recipe: str, processes: int, flags: str, layers: int, device: str
):
    words = flags.split()
    if recipe == "lm_moe":
        words += ["--data-dir", str(corpus(tmp_path / "corpus"))]
    expected, _ = run_distributed(run_recipe, processes, recipe, words, tmp_path / "cpu")[0]
    found, waits = run_distributed(run_recipe, processes, recipe, words, tmp_path / "device", device)[0]
    assert expected
    if device == "gpu":  # which adds in another order: a few answers come out differently
        assert found == pytest.approx(expected, rel=0.1, abs=0.05)
    else:
        # Attention has another kernel on a CPU.
        assert found == (pytest.approx(expected, rel=1e-5) if recipe == "lm_moe" else expected)
    assert waits.steps > 4
    if recipe != "lmu_speech":  # torch's CTC loss reads the lengths on the host
        # An all-to-all takes its sizes from the host: once per layer with experts on several processes.
        assert waits.in_steps == ["toolkit/experts/layer/dispatcher.py"] * layers * waits.steps
    # Plans and growth read loads and change weights, every few steps.
    assert bool(waits.after_steps) == (DYNAMIC in flags or MOVING in flags)


@pytest.mark.parametrize("device", DEVICES)
def test_augmented_training_on_a_device_equals_the_cpu_and_does_not_wait(tmp_path: Path, device: str):
    expected, _ = run_distributed(learn_images, 1, tmp_path / "cpu", None)[0]
    found, waits = run_distributed(learn_images, 1, tmp_path / "device", device)[0]
    close = {"rtol": 0, "atol": 0} if device == "emulated" else {"rtol": 0.1, "atol": 0.1}
    assert expected
    torch.testing.assert_close(found, expected, **close)
    assert waits.steps > 30
    assert waits.in_steps == waits.after_steps == []


@pytest.mark.parametrize("device", DEVICES)
def test_a_callback_that_reads_is_noticed(tmp_path: Path, device: str):
    _, waits = run_distributed(learn_images, 1, tmp_path, device, Reads())[0]
    assert waits.after_steps == ["toolkit/train/trainer.py"] * waits.steps


def train_in_transformers(folder: Path, name: str | None) -> list[tuple[float, float]]:
    """Loss and norm of gradients of each step, for experts that are trained and moved, and for adapters of them."""
    device = contextlib.nullcontext() if name is None else take(name)
    curves = []
    with device, quiet_float64():
        for model in (base("qwen3_moe"), adapted("qwen3_moe")):
            spread = {"replan": ReplanOptions(planner="lpt", every=1, guarded=False)}
            # What DDP keeps to find unused parameters, it copies to the device from a thread that the emulation misses.
            options = {"use_cpu": name != "gpu", "ddp_find_unused_parameters": False}
            trainer = make("Trainer", folder, model, spread=spread, **options)
            trainer.train()
            lines = trainer.state.log_history
            curves += [(line["loss"], line["grad_norm"]) for line in lines if "loss" in line]
            assert len(trainer.experts.migrations) > 0
    return curves


@pytest.mark.parametrize("device", DEVICES)
def test_transformers_trainer_computes_on_a_device_what_it_computes_on_a_cpu(tmp_path: Path, device: str):
    on_cpu = run_distributed(train_in_transformers, 2, tmp_path, None)[0]
    on_device = run_distributed(train_in_transformers, 2, tmp_path, device)[0]
    assert len(on_cpu) > 4
    torch.testing.assert_close(torch.tensor(on_device), torch.tensor(on_cpu), rtol=1e-9, atol=0)
