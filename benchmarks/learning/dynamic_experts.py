"""Costs and gains of dynamic experts on MNIST: growth, sleep phases and merges, compared with fixed experts.

    python benchmarks/learning/dynamic_experts.py --data-dir DIR         all tables; half an hour on two cores
    python benchmarks/learning/dynamic_experts.py cost --data-dir DIR    one table

stationary   five epochs of the same data: accuracy, and active experts at the end
sleep        five tasks with permuted pixels, two epochs each: test accuracy on all tasks so far, before and after each
             sleep phase
merge        a trained MoE model: merges of equal and of different experts
cost         processor time per step with and without dynamic experts, in interleaved rounds on one thread
"""

from __future__ import annotations

import argparse
import copy
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes")]

import toolkit as tk
from benchmarks.report import sd, write_report
from benchmarks.support.task_order import TaskOrder
from recipes.mnist_moe import Config, build_model, dynamic, full, main, top2
from toolkit.data.batches import EvalBatches
from toolkit.data.images import ImageData
from toolkit.dynamic.callback import COUNTED, Lifecycle
from toolkit.dynamic.dynamic_router import Hyperplane
from toolkit.dynamic.expert_rows import ExpertRows
from toolkit.dynamic.lifecycle_options import LifecycleOptions
from toolkit.dynamic.plans import Grow, Merge, free_logical_id
from toolkit.dynamic.setup import lifecycle_callbacks
from toolkit.dynamic.similarity import output_distances, reordered
from toolkit.dynamic.surgery import DynamicExperts
from toolkit.experts.layer.moe_layer import MoE, moe_layers
from toolkit.experts.parallel.seeding import generator

MEASURED_TOKENS = 2000
TASKS = 5
CHECK_EVERY = 25
"""Default steps between coverage checks."""
FIXED = "fixed, 8 experts"


def quiet(config: Config, folder: str, data_dir: Path | None, **changes: Any) -> Config:
    return config.replace(dataset="mnist", data_dir=data_dir, tracker="none", run_dir=Path(folder) / "run", **changes)


def stationary(data_dir: Path | None, seeds: int) -> list[dict[str, Any]]:
    """Compare the presets `full` and `dynamic` of `recipes/mnist_moe.py` without a data shift."""
    arms: dict[str, Callable[[], Config]] = {FIXED: full, "dynamic, from 4": dynamic}
    rows = []
    for arm, preset in arms.items():
        runs = []
        for seed in range(seeds):
            with tempfile.TemporaryDirectory() as folder:
                runs.append(main(quiet(preset(), folder, data_dir, seed=seed)))
        accuracy = [100 * run["test_accuracy"] for run in runs]
        counts: dict[str, list[int]] = {kind: [run.get(f"lifecycle_{kind}", 0) for run in runs] for kind in COUNTED}
        rows.append(
            {
                "arm": arm,
                "test accuracy %": round(statistics.mean(accuracy), 2),
                "sd": sd(accuracy, 2),
                "experts at the end": [run.get("active_experts", 8) for run in runs],
                "least over mean": [round(run.get("active_experts", 8) * run["min_expert_load"], 2) for run in runs],
                **counts,
            }
        )
    return rows


class EvaluatedLifecycle(Lifecycle):
    """Lifecycle with an evaluation on all tasks so far before and after each sleep phase."""

    def evaluate_on(self, tests: list[EvalBatches], task_ends: tuple[int, ...]) -> None:
        self.tests, self.task_ends, self.accuracies = tests, task_ends, list[tuple[float, float]]()

    def sleep(self, trainer: tk.Trainer) -> None:
        before = self.accuracy(trainer)
        super().sleep(trainer)
        self.accuracies.append((before, self.accuracy(trainer)))

    @torch.no_grad()
    def accuracy(self, trainer: tk.Trainer) -> float:
        seen = 1 + sum(end < trainer.state.step for end in self.task_ends[:-1])
        trainer.raw_model.eval()
        correct = total = 0
        for batches in self.tests[:seen]:
            for batch in batches:
                correct += int((trainer.raw_model(batch["input"]).argmax(1) == batch["label"]).sum())
                total += len(batch["label"])
        trainer.raw_model.train()
        return 100 * correct / total


def permuted(data: ImageData, seed: int) -> tuple[tk.TensorTable, list[tk.TensorTable]]:
    """Return training rows, with an equal part of the images for each task, and the test set of each task."""
    rows = torch.randperm(len(data.train), generator=generator(seed, "deal")).chunk(TASKS)
    orders = [torch.randperm(data.num_pixels, generator=generator(seed, "pixels", task)) for task in range(TASKS)]

    def changed(images: torch.Tensor, task: int) -> torch.Tensor:
        return images.flatten(1)[:, orders[task]].view_as(images)

    parts = [data.train[part] for part in rows]
    inputs = [changed(part["input"], task) for task, part in enumerate(parts)]
    train = tk.TensorTable(input=torch.cat(inputs), label=torch.cat([part["label"] for part in parts]))
    images, labels = data.test.columns["input"], data.test.columns["label"]
    return train, [tk.TensorTable(input=changed(images, task), label=labels) for task in range(TASKS)]


def sleeps(data_dir: Path | None, seeds: int) -> list[dict[str, Any]]:
    """Measure sleep phases over five tasks of two epochs."""
    rows = []
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as folder:
            lifecycle = LifecycleOptions(
                check_every=10, cooldown_checks=4, min_age=200, sleep_every=120, min_sleep_every=1, merge_distance=0.3
            )
            config = quiet(top2(), folder, data_dir, seed=seed, epochs=1, lr=1e-3, blank_pixels=0.0, experts=4)
            config = config.replace(
                schedule=tk.ScheduleOptions(kind="constant"), lifecycle=lifecycle, max_experts=8, cpu=True
            )
            with tk.start_run("dynamic_experts", config) as run:
                data = tk.load_images(config.dataset, config.data_dir, on_main=run.on_main_and_share)
                train, tests = permuted(data, seed)
                model = build_model(config, data, tk.experts.make_expert_groups(1))
                penalty = tk.experts.RouterPenalty(model, balance_weight=config.balance_weight)
                task = tk.Classification(penalty=penalty)
                remember, lifecycle_callback, report = lifecycle_callbacks(config, model, task, train, data.num_classes)
                lifecycle_callback.__class__ = EvaluatedLifecycle
                assert isinstance(lifecycle_callback, EvaluatedLifecycle)
                order = TaskOrder(
                    tasks=TASKS,
                    samples_per_task=len(train) // TASKS,
                    batch_size=config.batch_size,
                    seed=seed,
                    epochs_per_task=2,
                )
                ends = tuple(range(order.steps_per_task, order.steps_per_epoch + 1, order.steps_per_task))
                lifecycle_callback.evaluate_on([EvalBatches(test, batch_size=1000) for test in tests], ends)
                callbacks = [remember, lifecycle_callback, report]
                splits = tk.Splits(train, tests[-1])
                results = tk.fit(
                    run,
                    task,
                    model,
                    tk.build_optimizer(model, config),
                    splits,
                    order=order,
                    callbacks=callbacks,
                )
        accuracies = lifecycle_callback.accuracies
        changes = [after - before for before, after in accuracies]
        kinds = [event.kind for event in lifecycle_callback.history]
        grown = [event.step for event in lifecycle_callback.history if event.kind == "grow"]
        every = (
            lifecycle.check_every or 0
        )  # checks include upcoming samples, so growth can precede a shift by one check
        answered = sum(
            any(start - every < step <= end - every for step in grown) for start, end in itertools.pairwise(ends)
        )
        rows.append(
            {
                "stream": "permuted",
                "seed": seed,
                "shifts": len(ends) - 1,
                "answered by growth": answered,
                "sleeps": len(changes),
                **{kind: kinds.count(kind) for kind in ("grow", "merge", "prune", "undone")},
                "experts at the end": results["active_experts"],
                "before a sleep, mean %": round(statistics.mean(before for before, _ in accuracies), 1),
                "after it, mean %": round(statistics.mean(after for _, after in accuracies), 1),
                "change over a sleep, mean points": round(statistics.mean(changes), 2),
                "worst": round(min(changes), 2),
            }
        )
    return rows


@torch.no_grad()
def merges(data_dir: Path | None, seeds: int) -> list[dict[str, Any]]:
    """Measure merges after one epoch: of a split expert with one half permuted, and of two different experts."""
    rows = []
    for seed in range(seeds):
        with (
            tempfile.TemporaryDirectory() as folder,
            tk.start_run("dynamic_experts", config := merge_config(folder, data_dir, seed)) as run,
        ):
            data = tk.load_images(config.dataset, config.data_dir, on_main=run.on_main_and_share)
            model = build_model(config, data, tk.experts.make_expert_groups(1))
            penalty = tk.experts.RouterPenalty(model, balance_weight=config.balance_weight)
            task = tk.Classification(penalty=penalty)
            callbacks = lifecycle_callbacks(config, model, task, data.train, data.num_classes)
            with torch.enable_grad():
                tk.fit(
                    run,
                    task,
                    model,
                    tk.build_optimizer(model, config),
                    data,
                    callbacks=callbacks,
                )
        (layer,) = moe_layers(model).values()
        images, labels = data.test.columns["input"], data.test.columns["label"]
        model.eval()
        before = accuracy_of(model, images, labels)
        twin, twin_distance = merged_twin(copy.deepcopy(model), images, seed)
        forced = copy.deepcopy(model)
        DynamicExperts(only_layer(forced)).carry_out("", Merge(1, 0, 0.5, {}), None, step=0)
        inputs = inputs_of(model, layer, images[:MEASURED_TOKENS])
        rows.append(
            {
                "seed": seed,
                "test accuracy %": round(before, 2),
                "twins merged %": round(accuracy_of(twin, images, labels), 2),
                "distance of twins": round(twin_distance, 4),
                "least distance of others": round(closest(output_distances(layer, inputs, range(8))), 2),
                "two others merged by force %": round(accuracy_of(forced, images, labels), 2),
            }
        )
    return rows


def merge_config(folder: str, data_dir: Path | None, seed: int) -> Config:
    """Return a config with two spare logical experts and no lifecycle in training."""
    unused = LifecycleOptions(check_every=None, sleep_every=None)
    return quiet(top2(), folder, data_dir, seed=seed, epochs=1, max_experts=10, lifecycle=unused, cpu=True)


def only_layer(model: torch.nn.Module) -> MoE:
    (layer,) = moe_layers(model).values()
    return layer


def merged_twin(model: torch.nn.Module, images: torch.Tensor, seed: int) -> tuple[torch.nn.Module, float]:
    """Split an expert, permute one half and merge; return the model and the distance of the halves' outputs."""
    layer = only_layer(model)
    inputs = inputs_of(model, layer, images[:MEASURED_TOKENS])
    experts = DynamicExperts(layer)
    normal_D = torch.randn(inputs.shape[1], generator=torch.Generator().manual_seed(seed))
    logical_id = free_logical_id(experts.rosters[""], layer.placement)
    assert logical_id is not None
    plane = Hyperplane(normal_D, float((inputs @ normal_D).median()))
    experts.carry_out("", Grow(0, logical_id, {}), None, step=0, plane=plane)
    rows = ExpertRows(layer.expert_stack, None)
    order = torch.randperm(layer.experts.down.shape[1], generator=torch.Generator().manual_seed(seed))
    rows.write(logical_id, reordered(rows.fetch(logical_id), order))
    distance = closest(output_distances(layer, inputs, [0, logical_id]))
    experts.carry_out("", Merge(8, 0, 0.5, {}), None, step=0)
    return model, distance


def closest(distance_LL: torch.Tensor) -> float:
    return float(distance_LL.fill_diagonal_(torch.inf).min())


def inputs_of(model: torch.nn.Module, layer: MoE, images: torch.Tensor) -> torch.Tensor:
    """Return the inputs of the layer for `images`."""
    seen: list[torch.Tensor] = []
    hook = layer.router.register_forward_hook(lambda _module, args, _routing: seen.append(args[0]))
    model(images)
    hook.remove()
    return seen[0]


def accuracy_of(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    return 100 * float((model(images).argmax(1) == labels).double().mean())


class StepClock(tk.Callback):
    """Processor time at the start of each step."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_start(self, trainer: tk.Trainer, micro_batches: list[Any]) -> None:  # noqa: ARG002
        self.times.append(time.process_time())

    def milliseconds(self, steps: int) -> list[float]:
        """Return milliseconds per step for each block of `steps` steps except the first."""
        pairs = itertools.pairwise(self.times[steps::steps])
        return [1000 * (after - before) / steps for before, after in pairs]


def cost(data_dir: Path | None, rounds: int) -> list[dict[str, Any]]:
    """Measure processor time per step of `top2` in blocks with one coverage check, arms in turn.

    Other jobs on the machine lengthen some blocks, so there are a median and a lower decile.
    """
    awake = LifecycleOptions(sleep_every=None)
    arms = {
        FIXED: top2(),
        "growth on, 8 of 8 logical experts active": top2().replace(max_experts=8, lifecycle=awake),
        "growth on, 8 of 16 logical experts active": top2().replace(max_experts=16, lifecycle=awake),
    }
    blocks: dict[str, list[float]] = {arm: [] for arm in arms}
    for _ in range(rounds):
        for arm, config in arms.items():
            with tempfile.TemporaryDirectory() as folder:
                steps = 20 * CHECK_EVERY + 1
                blocks[arm] += step_times(quiet(config, folder, data_dir, cpu=True, max_steps=steps))
    lowest, middle = ({arm: quantile(times, at) for arm, times in blocks.items()} for at in (0.1, 0.5))
    return [
        {
            "arm": arm,
            "ms per step, lower decile": round(lowest[arm], 2),
            "of the fixed mixture's": round(lowest[arm] / lowest[FIXED], 3),
            "median": round(middle[arm], 2),
            "of the fixed mixture's median": round(middle[arm] / middle[FIXED], 3),
            "blocks": len(blocks[arm]),
        }
        for arm in arms
    ]


def quantile(values: list[float], at: float) -> float:
    return float(torch.tensor(values).quantile(at))


def step_times(config: Config) -> list[float]:
    """Return milliseconds of processor time per step, in blocks between coverage checks."""
    clock = StepClock()
    with tk.start_run("dynamic_experts", config) as run:
        data = tk.load_images(config.dataset, config.data_dir, on_main=run.on_main_and_share)
        model = build_model(config, data, tk.experts.make_expert_groups(1))
        task = tk.Classification()
        changes = lifecycle_callbacks(config, model, task, data.train, data.num_classes)
        tk.fit(
            run,
            task,
            model,
            tk.build_optimizer(model, config),
            data,
            callbacks=[clock, *changes],
        )
    return clock.milliseconds(CHECK_EVERY)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tables = {"stationary": stationary, "sleep": sleeps, "merge": merges, "cost": cost}
    parser.add_argument("tables", nargs="*", choices=[*tables, []], default=[], help="tables. Default: all")
    parser.add_argument("--data-dir", type=Path, default=None, help="folder with MNIST. Default: $TOOLKIT_DATA_DIR")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds, or of rounds for `cost`. Default: 5")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.tables or tables:
        write_report(f"dynamic_experts_{name}", tables[name](args.data_dir, args.seeds))
