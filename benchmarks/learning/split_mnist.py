"""Split MNIST with a memory of 50 to 5,000 images: dynamic experts beside rivals that use the memory otherwise.

    python benchmarks/learning/split_mnist.py --data-dir DIR       five seeds, an hour on one core; goes on where it was
    python benchmarks/learning/split_mnist.py --arms               only the table of what has been run

The stream, the network (the preset `dense` of `recipes/mnist_moe.py`), AdamW at 1e-3, the clipping, the
initial weights, the order of the images and the rows that are remembered are those of `continual_learning.py`; its
arms "dynamic" and "fixed mixture, sleep" are trained with each size of memory as well.

ER       each batch of 64 new images with 64 remembered ones (Chaudhry et al. 2019, arXiv 1902.10486)
DER++    64 remembered images are to keep the logits that they had when they were stored, 64 more their labels; a
         reservoir of the images seen (Buzzega et al. 2020, arXiv 2004.07211)
GDumb    nothing is learned from the stream; at its end a new network is trained on the balanced memory alone
         (Prabhu et al. 2020, ECCV)

"twice" takes two optimizer steps per batch of the stream, as many as the arms that sleep, and GDumb as many in all.
"affine" turns, shifts, scales and shears each image anew at every visit, new ones as well as remembered ones. What was
chosen (the two weights of DER++, the schedule of GDumb) was chosen on 5,000 training images that were held out, with a
seed of no table and 1,000 remembered images; the test set is read once for each run. Writes
benchmarks/results/split_mnist.json.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes")]

from benchmarks.learning.continual_learning import CELLS, PAGE, SPLIT_SAMPLES, Cell, mean_and_error, train
from benchmarks.report import markdown, put_tables, sd, write_report
from continual.streams import TaskOrder, TaskStream, split_stream
from digits.affine import DRAWS, AffineRange, warp
from recipes.mnist_moe import build_model, dense
from toolkit.data.images import ImageData, held_out, load_images
from toolkit.data.replay_memory import ReplayMemory
from toolkit.data.table import Batch, TensorTable
from toolkit.data.visit_draws import VisitDraws
from toolkit.experts.parallel.groups import make_expert_groups
from toolkit.experts.parallel.seeding import derive_seed, generator
from toolkit.run.config.optimizer_options import OptimizerOptions
from toolkit.run.folder import write_json
from toolkit.train.optim import build_optimizer

MEMORIES = (50, 200, 500, 1000, 5000)
BATCH = 64
TUNING_SEED, TUNING_MEMORY = 100, 1000
OURS = {
    "dynamic": ("dynamic", False),
    "fixed mixture, sleep": ("fixed mixture, sleep", False),
    "dynamic, affine": ("dynamic", True),
    "fixed mixture, sleep, affine": ("fixed mixture, sleep", True),
}
"""Arms of `continual_learning.py`, and whether images are changed."""
REFERENCE = "dynamic, affine"
"""The arm that is set beside all others: the better of ours."""
RUNS = CELLS.parent / "split_mnist"


@dataclass(frozen=True, kw_only=True)
class Rival:
    """A way to use the memory."""

    method: str
    steps_per_batch: int = 1
    affine: bool = False
    logits_weight: float = 0.5
    """Of DER++: alpha of the paper."""
    labels_weight: float = 1.0
    """Of DER++: beta of the paper."""
    cosine: bool = False
    """Of GDumb: the learning rate falls to zero along a cosine; else it is constant."""


RIVALS = {
    "ER": Rival(method="ER"),
    "ER, twice": Rival(method="ER", steps_per_batch=2),
    "ER, affine": Rival(method="ER", affine=True),
    "DER++": Rival(method="DER++"),
    "DER++, twice": Rival(method="DER++", steps_per_batch=2),
    "DER++, affine": Rival(method="DER++", affine=True),
    "GDumb": Rival(method="GDumb", steps_per_batch=2),
    "GDumb, affine": Rival(method="GDumb", steps_per_batch=2, affine=True),
}
CHOICES: dict[str, list[dict[str, Any]]] = {
    "DER++": [{"logits_weight": a, "labels_weight": b} for a in (0.2, 0.5, 1.0) for b in (0.5, 1.0)],
    "GDumb": [{"cosine": False}, {"cosine": True}],
}
"""What is tried on held-out training images, by method."""


class Reservoir:
    """A uniform sample of the images seen, in the order in which they came (Vitter 1985), with notes on each."""

    def __init__(self, capacity: int, seed: int):
        self.capacity, self.seen, self.draws = capacity, 0, generator(seed, "reservoir")
        self.rows = torch.empty(capacity, dtype=torch.int64)
        self.logits = torch.empty(0)

    def __len__(self) -> int:
        return min(self.seen, self.capacity)

    def add(self, rows: Tensor, logits: Tensor) -> None:
        """Rows of the training table (N,) and the logits (N, classes) that they had."""
        if not len(self.logits):
            self.logits = torch.empty(self.capacity, logits.shape[1])
        for row, noted in zip(rows.tolist(), logits, strict=True):
            place = self.seen
            if self.seen >= self.capacity:
                place = int(torch.randint(self.seen + 1, (), generator=self.draws))
            if place < self.capacity:
                self.rows[place], self.logits[place] = row, noted
            self.seen += 1

    def sample(self, count: int) -> tuple[Tensor, Tensor]:
        """`count` of what is remembered, or all where there is less: rows, and their logits."""
        places = torch.randperm(len(self), generator=self.draws)[:count]
        return self.rows[places], self.logits[places]


def affine(images: Tensor, draws: torch.Generator) -> Tensor:
    """uint8 images (N, 28, 28), each turned by up to 15 degrees, scaled by 0.85 to 1.15, sheared by up to 0.15 and
    shifted by up to 3 pixels. Bilinear, black beyond the border.
    """
    between = [2 * torch.rand(len(images), generator=draws) - 1 for _ in range(DRAWS)]
    return warp(images, torch.stack(between, 1), AffineRange())


class Changed:
    """`affine` as an augmentation of the trainer's."""

    def __init__(self, seed: int):
        draws = torch.rand(65_479, DRAWS, generator=generator(seed, "affine"))
        self.draws = VisitDraws(2 * draws - 1)

    def __call__(self, batch: Batch, visits: Tensor) -> Batch:
        return {**batch, "input": warp(batch["input"], self.draws(visits), AffineRange())}


class Learner:
    """The network and its optimizer, as the recipe makes them."""

    def __init__(self, data: ImageData, seed: int):
        config = dense().replace(blank_pixels=0.0)
        torch.manual_seed(derive_seed(seed, "start"))
        self.model: nn.Module = build_model(config, data, make_expert_groups(1))
        self.optimizer = build_optimizer(self.model, lr=1e-3, config=OptimizerOptions())

    def step(self, loss: Tensor) -> None:
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    @torch.inference_mode()
    def accuracies(self, tests: Sequence[TensorTable]) -> list[float]:
        """The fraction of each test table that is answered rightly."""
        answers = [self.model(test.columns["input"]).argmax(1) == test.columns["label"] for test in tests]
        return [float(right.float().mean()) for right in answers]


def batches_of(stream: TaskStream, seed: int) -> Iterator[Tensor]:
    """The rows of each batch of one epoch of the stream."""
    order = TaskOrder(sizes=stream.sizes, batch_size=BATCH, seed=seed)
    return islice(order.batches(0), order.steps_per_epoch)


def learn(rival: Rival, stream: TaskStream, data: ImageData, memory: int, seed: int) -> Learner:
    """The network after the stream."""
    learner = Learner(data, seed)
    images, draws = stream.train.columns["input"], generator(seed, "affine")

    def seen(rows: Tensor) -> Tensor:
        return affine(images[rows], draws) if rival.affine else images[rows]

    methods: dict[str, Callable[[], None]] = {
        "ER": lambda: er(learner, rival, stream, seen, memory, seed),
        "DER++": lambda: der(learner, rival, stream, seen, memory, seed),
        "GDumb": lambda: gdumb(learner, rival, stream, seen, memory, seed),
    }
    methods[rival.method]()
    return learner


def er(
    learner: Learner, rival: Rival, stream: TaskStream, seen: Callable[[Tensor], Tensor], memory: int, seed: int
) -> None:
    labels = stream.train.columns["label"]
    remembered = ReplayMemory(stream.train, memory, seed=seed)
    since: list[Tensor] = []
    for step, rows in enumerate(batches_of(stream, seed), start=1):
        for turn in range(rival.steps_per_batch):
            old = remembered.draw(BATCH, step, turn) if len(remembered) else rows[:0]
            both = torch.cat([rows, old])
            learner.step(F.cross_entropy(learner.model(seen(both)), labels[both]))
        since.append(rows)
        if step % 10 == 0:  # as the callback `Remember`
            remembered.add(torch.cat(since))
            since.clear()


def der(
    learner: Learner, rival: Rival, stream: TaskStream, seen: Callable[[Tensor], Tensor], memory: int, seed: int
) -> None:
    labels = stream.train.columns["label"]
    remembered = Reservoir(memory, seed)
    for rows in batches_of(stream, seed):
        for turn in range(rival.steps_per_batch):
            if not len(remembered):
                outputs = learner.model(seen(rows))
                loss = F.cross_entropy(outputs, labels[rows])
            else:
                (old, logits), (older, _) = remembered.sample(BATCH), remembered.sample(BATCH)
                outputs = learner.model(seen(torch.cat([rows, old, older])))
                new, kept, named = outputs.split([len(rows), len(old), len(older)])
                loss = (
                    F.cross_entropy(new, labels[rows])
                    + rival.logits_weight * F.mse_loss(kept, logits)
                    + rival.labels_weight * F.cross_entropy(named, labels[older])
                )
            if not turn:
                noted = outputs[: len(rows)].detach()
            learner.step(loss)
        remembered.add(rows, noted)


def gdumb(
    learner: Learner, rival: Rival, stream: TaskStream, seen: Callable[[Tensor], Tensor], memory: int, seed: int
) -> None:
    labels = stream.train.columns["label"]
    remembered = ReplayMemory(stream.train, memory, seed=seed)
    steps = 0
    for rows in batches_of(stream, seed):
        remembered.add(rows)
        steps += rival.steps_per_batch
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(learner.optimizer, steps)
    draws = generator(seed, "gdumb")
    left = torch.empty(0, dtype=torch.int64)
    for _ in range(steps):
        while len(left) < BATCH:
            left = torch.cat([left, remembered.rows[torch.randperm(len(remembered), generator=draws)]])
        rows, left = left[:BATCH], left[BATCH:]
        learner.step(F.cross_entropy(learner.model(seen(rows)), labels[rows]))
        if rival.cosine:
            scheduler.step()


def measured(rival: Rival, data: ImageData, memory: int, seed: int) -> dict[str, Any]:
    """Accuracy on each task at the end, their mean, and the seconds that it took."""
    stream = split_stream(data, samples_per_task=SPLIT_SAMPLES)
    began = time.process_time()
    accuracies = learn(rival, stream, data, memory, seed).accuracies(stream.tests)
    seconds = round(time.process_time() - began, 1)
    return {"accuracies": accuracies, "average_accuracy": statistics.mean(accuracies), "seconds": seconds}


def chosen(rival: Rival, data: Callable[[], ImageData]) -> tuple[Rival, list[dict[str, Any]]]:
    """`rival` with the settings that did best on held-out training images, and what was tried."""
    tried = []
    for settings in CHOICES.get(rival.method, []):
        trial = replace(rival, **settings)
        words = "_".join(f"{name}_{value}" for name, value in settings.items())
        file = RUNS / f"tuning-{rival.method}-{rival.steps_per_batch}-{rival.affine}-{words}.json"
        if not file.exists():
            write_json(file, measured(trial, held_out(data()), TUNING_MEMORY, TUNING_SEED))
        found = json.loads(file.read_text())["average_accuracy"]
        tried.append({**settings, "held-out accuracy %": round(100 * found, 2)})
    if not tried:
        return rival, []
    best = max(tried, key=lambda trial: trial["held-out accuracy %"])
    return replace(rival, **{name: value for name, value in best.items() if name != "held-out accuracy %"}), tried


def run(arm: str, memory: int, seed: int, rival: Rival | None, data: Callable[[], ImageData], data_dir: Any) -> None:
    """One run, unless it was made before."""
    file = file_of(arm, memory, seed)
    if file.exists():
        return
    if rival is None:
        began = time.process_time()
        name, changed = OURS[arm]
        augment = Changed(seed) if changed else None
        found = train(Cell(stream="split", arm=name, seed=seed, memory=memory), data_dir, augment=augment)
        found = {"average_accuracy": found["average_accuracy"], "seconds": round(time.process_time() - began, 1)}
    else:
        found = measured(rival, data(), memory, seed)
    write_json(file, {"arm": arm, "memory": memory, "seed": seed, **found})


def file_of(arm: str, memory: int, seed: int) -> Path:
    return RUNS / f"{arm}-{memory}-{seed}.json".replace(", ", "_").replace(" ", "_")


def table(found: Mapping[tuple[str, int], Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """A row per arm and size: percent, and a verdict beside `REFERENCE` by two standard errors."""
    rows = []
    for (arm, memory), runs in found.items():
        values = [100 * each["average_accuracy"] for each in runs]
        row: dict[str, Any] = {
            "arm": arm,
            "memory": memory,
            "seeds": len(values),
            "average accuracy %": round(statistics.mean(values), 1),
            "sd": sd(values, 1),
            "each seed": [round(value, 1) for value in values],
            "CPU seconds, median": round(statistics.median(each["seconds"] for each in runs), 1),
            "less the reference": None,
            "standard error": None,
            "verdict": None,
        }
        ours = [100 * each["average_accuracy"] for each in found.get((REFERENCE, memory), [])]
        if arm != REFERENCE and min(len(ours), len(values)) > 1:
            (a, error_a), (b, error_b) = mean_and_error(values), mean_and_error(ours)
            error = math.hypot(error_a, error_b)
            verdict = "equal" if abs(a - b) <= 2 * error else "better" if a > b else "worse"
            row |= {"less the reference": round(a - b, 1), "standard error": round(error, 1), "verdict": verdict}
        rows.append(row)
    return rows


def by_memory(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """The table of the documentation: a row per arm, a column per size; + and - beside `REFERENCE`."""
    signs = {"better": " +", "worse": " -"}
    found: dict[str, dict[str, str]] = {}
    for row in rows:
        cell = f"{row['average accuracy %']} ({row['sd']}){signs.get(row['verdict'], '')}"
        found.setdefault(row["arm"], {"arm": row["arm"]})[f"{row['memory']:,} images"] = cell
    return list(found.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=None, help="folder with MNIST; else $TOOLKIT_DATA_DIR")
    parser.add_argument("--arms", nargs="*", choices=[*RIVALS, *OURS], default=[*RIVALS, *OURS])
    parser.add_argument("--memories", type=int, nargs="+", default=list(MEMORIES))
    parser.add_argument("--seeds", type=int, default=5, help="how many")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    RUNS.mkdir(parents=True, exist_ok=True)
    loaded: list[ImageData] = []

    def data() -> ImageData:
        if not loaded:
            loaded.append(load_images("mnist", args.data_dir, on_main=lambda decide: decide()))
        return loaded[0]

    rivals = {arm: chosen(RIVALS[arm], data) for arm in RIVALS if arm in args.arms or any_run_of(arm)}
    for seed in range(args.seeds):
        for memory in args.memories:
            for arm in args.arms:
                run(arm, memory, seed, rivals[arm][0] if arm in rivals else None, data, args.data_dir)
    found: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for memory in MEMORIES:
        for arm in [*OURS, *RIVALS]:
            files = [file for seed in range(100) if (file := file_of(arm, memory, seed)).exists()]
            if files:
                found[arm, memory] = [json.loads(file.read_text()) for file in files]
    if found:
        tried = {arm: trials for arm, (_, trials) in rivals.items() if trials}
        rows = table(found)
        write_report("split_mnist", rows, tuning=tried, batch_size=BATCH)
        put_tables(
            PAGE, "learning/split_mnist.py", f"<!-- figures: split_mnist.json by arm -->\n{markdown(by_memory(rows))}"
        )


def any_run_of(arm: str) -> bool:
    return any(file_of(arm, memory, 0).exists() for memory in MEMORIES)


if __name__ == "__main__":
    main()
