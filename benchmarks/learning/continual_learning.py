"""Five tasks one after another: what is left of the earlier ones, by each way of learning.

    python benchmarks/learning/continual_learning.py --data-dir DIR  hours on one core; stops and goes on as you like
    python benchmarks/learning/continual_learning.py --streams permuted --arms replay "fixed mixture" --seeds 2
    python benchmarks/learning/continual_learning.py --streams "permuted, 20 tasks"  five arms

Every cell (stream, arm, seed) leaves a file in runs/continual_learning, and is not trained again. At the end, tables
of all cells that there are, benchmarks/results/continual_learning.json, and pictures in docs/images.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import sqrt
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes")]

import toolkit as tk
from benchmarks.report import markdown, put_tables, write_report
from continual.evaluation import TaskEvaluation
from continual.ewc import Consolidation, ElasticWeights
from continual.plots import draw_accuracy_matrices, draw_average_accuracies
from continual.streams import TaskStream, permuted_stream, rotated_stream, split_stream
from continual.training import stream_task, task_order
from recipes.mnist_moe import Config, build_model, top2
from toolkit.data.batches import Augment, BatchOrder
from toolkit.data.images import ImageData
from toolkit.data.replay_memory import ReplayMemory
from toolkit.data.table import TensorTable
from toolkit.dynamic.drift import DriftWatch
from toolkit.dynamic.lifecycle_options import LifecycleOptions
from toolkit.dynamic.remember import Remember, Replay
from toolkit.run.folder import write_json
from toolkit.train.build import lifecycle_callbacks

PAGE = ROOT / "docs" / "recipes" / "continual_learning.md"
TITLES = {
    "": "Percent, mean over seeds (standard deviation)",
    "verdicts": "Final average accuracy of one arm less that of another; better or worse beyond two standard errors",
    "tuning": "Strengths of elastic weights",
    "drift": "Changes of task noticed in the loss, before the next; joint training has none",
}
CELLS = ROOT / "runs" / "continual_learning"
MEMORY = 1000
"""Remembered samples of every arm that remembers any."""
STRENGTHS = (10.0, 100.0, 1000.0, 10000.0)
"""Of elastic weights; the best on `TUNING_SEEDS`, which are in no other table, is taken for each stream."""
TUNING_SEEDS = (100,)
SPLIT_SAMPLES = 11263
"""Per task: as many as there are fours and fives."""
SLEEPS_PER_TASK = 8


def few_tests(data: ImageData) -> ImageData:
    """With the first 2,000 test images: each of 20 tasks is tested after each."""
    return replace(data, test=TensorTable(**{name: column[:2000] for name, column in data.test.columns.items()}))


STREAMS: dict[str, Callable[[ImageData, int], TaskStream]] = {
    "split": lambda data, seed: split_stream(data, samples_per_task=SPLIT_SAMPLES),  # noqa: ARG005
    "permuted": lambda data, seed: permuted_stream(data, seed=seed, divided=True),
    "rotated": lambda data, seed: rotated_stream(data, seed=seed, divided=True),
    "permuted, 20 tasks": lambda data, seed: permuted_stream(few_tests(data), seed=seed, num_tasks=20, divided=True),
    "split, domain": lambda data, seed: split_stream(data, scenario="domain", samples_per_task=SPLIT_SAMPLES),  # noqa: ARG005
    "split, task": lambda data, seed: split_stream(data, scenario="task", samples_per_task=SPLIT_SAMPLES),  # noqa: ARG005
}
LEADING = ("split", "permuted", "rotated")
LONG = "permuted, 20 tasks"
OF_32 = ("fixed mixture of 32, sleep", "dynamic, at most 32")
LONG_ARMS = ("replay", "fixed mixture, sleep", "dynamic", *OF_32)
"""The stream for which few experts may be too few, and the arms that are tried on it."""
PICTURED = (
    "fine-tuning",
    "elastic weights",
    "replay",
    "fixed mixture",
    "fixed mixture, replay",
    "fixed mixture, sleep",
    "dynamic",
    "dynamic, no sleep",
)
OURS = "dynamic"
"""The arm that is set beside all others."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A network and what keeps it from forgetting."""

    settings: Mapping[str, Any]
    """Of `recipes/mnist_moe.py`."""
    method: str = ""
    lifecycle: Mapping[str, Any] = field(default_factory=dict)


# As many parameters per sample as two experts of 128 have, and as many as eight of them.
DENSE = {"experts": 0, "top_k": 1}
WIDE = {"experts": 0, "top_k": 1, "expert_hidden_size": 512}
MIXTURE = {"experts": 8}
ACTIVE = {"experts": 4, "max_experts": 8}
LIFE = LifecycleOptions(
    check_every=10,
    cooldown_checks=4,
    adaptive_sleep=False,
    min_sleep_every=1,
    memory_size=MEMORY,
    replay_lr=1e-3,
    min_age=100,
    undo_above=0.1,
)
"""The tolerance, the distance at which experts merge and the number of sleeps were chosen on seeds 100 and 101."""
SLEEP_ONLY = {"grow": False, "merge": False, "prune": False}
ARMS = {
    "fine-tuning": Arm(settings=DENSE),
    "fine-tuning, wide": Arm(settings=WIDE),
    "elastic weights": Arm(settings=DENSE, method="elastic"),
    "replay": Arm(settings=DENSE, method="replay"),
    "fixed mixture": Arm(settings=MIXTURE),
    "fixed mixture, replay": Arm(settings=MIXTURE, method="replay"),
    "fixed mixture, sleep": Arm(settings=MIXTURE | {"max_experts": 8}, method="lifecycle", lifecycle=SLEEP_ONLY),
    "fixed mixture of 32, sleep": Arm(
        settings={"experts": 32, "max_experts": 32}, method="lifecycle", lifecycle=SLEEP_ONLY
    ),
    "dynamic": Arm(settings=ACTIVE, method="lifecycle"),
    "dynamic, at most 32": Arm(settings=ACTIVE | {"max_experts": 32}, method="lifecycle"),
    "dynamic, no growth": Arm(settings=ACTIVE, method="lifecycle", lifecycle={"grow": False}),
    "dynamic, no merging": Arm(settings=ACTIVE, method="lifecycle", lifecycle={"merge": False}),
    "dynamic, no pruning": Arm(settings=ACTIVE, method="lifecycle", lifecycle={"prune": False}),
    "dynamic, no sleep": Arm(settings=ACTIVE, method="lifecycle", lifecycle={"sleep": False}),
    "dynamic, no graph": Arm(settings=ACTIVE, method="lifecycle", lifecycle={"graph": False}),
    "joint": Arm(settings=DENSE, method="joint"),
    "joint mixture": Arm(settings=MIXTURE, method="joint"),
}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One training run."""

    stream: str
    arm: str
    seed: int
    strength: float | None = None
    memory: int = MEMORY

    @property
    def file(self) -> Path:
        words = [self.stream, self.arm, *([] if self.strength is None else [f"{self.strength:g}"]), str(self.seed)]
        words += [] if self.memory == MEMORY else [f"memory_{self.memory}"]
        return CELLS / ("-".join(words).replace(", ", "_").replace(" ", "_") + ".json")

    def result(self) -> dict[str, Any]:
        return json.loads(self.file.read_text(encoding="utf-8"))


def train(
    cell: Cell, data_dir: Path | None = None, dataset: str = "mnist", augment: Augment | None = None
) -> dict[str, Any]:
    """Learn the tasks of a cell's stream in turn; what `TaskEvaluation` and the other callbacks found."""
    arm = ARMS[cell.arm]
    with tempfile.TemporaryDirectory() as folder:
        config: Config = top2().replace(
            epochs=1,
            lr=1e-3,
            blank_pixels=0.0,
            schedule=tk.ScheduleOptions(name="constant"),
            log_every=5,
            seed=cell.seed,
            dataset=dataset,
            data_dir=data_dir,
            cpu=True,
            tracker="none",
            run_dir=Path(folder) / "run",
            **arm.settings,
        )
        with tk.start_run("continual_learning", config) as run:
            data = tk.load_images(config.dataset, config.data_dir, on_main=run.on_main_and_share)
            stream = STREAMS[cell.stream](data, cell.seed)
            model = build_model(config, replace(data, num_classes=stream.num_classes), tk.experts.make_expert_groups(1))
            parameters = sum(parameter.numel() for parameter in model.parameters())
            balance = tk.experts.RouterPenalty(model, balance_weight=config.balance_weight)
            elastic = None if cell.strength is None else ElasticWeights(model, cell.strength)
            task = stream_task(stream, penalty=elastic or balance)
            tasks = task_order(run, stream)
            ends = tasks.task_ends
            callbacks: list[tk.Callback] = [DriftWatch()]
            if elastic is not None:
                callbacks += [Consolidation(elastic, stream, ends)]
            elif arm.method == "replay":
                memory = ReplayMemory(stream.train, cell.memory, seed=cell.seed)
                callbacks += [Replay(memory, config.batch_size), Remember(memory)]
            elif arm.method == "lifecycle":
                # As many remembered samples are replayed as by `Replay`, but in sleep.
                every = max(1, ends[0] // SLEEPS_PER_TASK)
                lifecycle = LIFE.replace(
                    memory_size=cell.memory, sleep_every=every, replay_steps=every, **arm.lifecycle
                )
                active = config.replace(lifecycle=lifecycle)
                callbacks += lifecycle_callbacks(active, model, task, stream.train, stream.num_classes)
            joint = BatchOrder(num_samples=len(stream.train), batch_size=config.batch_size, seed=cell.seed)
            order = joint if arm.method == "joint" else tasks
            trainer = tk.standard_trainer(
                run,
                task,
                model,
                tk.adamw(model, config),
                train=stream.train,
                order=order,
                augment=augment,
                max_steps=ends[-1],
                evaluation=TaskEvaluation(stream.tests, ends),
                callbacks=callbacks,
            )
            return {**asdict(cell), "parameters": parameters, "task_ends": ends, **trainer.fit()}


def usual_arms(stream: str) -> list[str]:
    """The arms of a stream where none are named."""
    return list(LONG_ARMS) if stream == LONG else [arm for arm in ARMS if arm not in OF_32]


def cells(arms: Mapping[str, Sequence[str]], seeds: Sequence[int]) -> Iterator[Cell]:
    """What is to be trained: `arms` of each stream. Strengths are chosen when their turn comes, from cells that were
    trained before."""
    tuned = [stream for stream in arms if "elastic weights" in arms[stream]]
    yield from (Cell(stream=s, arm="elastic weights", seed=seed, strength=x) for s, seed, x in tuning(tuned))
    for seed in seeds:
        for stream in arms:
            for arm in arms[stream]:
                yield Cell(
                    stream=stream,
                    arm=arm,
                    seed=seed,
                    strength=best_strength(stream) if arm == "elastic weights" else None,
                )


def tuning(streams: Sequence[str]) -> Iterator[tuple[str, int, float]]:
    return ((stream, seed, strength) for seed in TUNING_SEEDS for stream in streams for strength in STRENGTHS)


def best_strength(stream: str) -> float:
    """Of the highest mean accuracy on the tuning seeds."""

    def accuracy(strength: float) -> float:
        tried = [Cell(stream=stream, arm="elastic weights", seed=seed, strength=strength) for seed in TUNING_SEEDS]
        return statistics.mean(cell.result()["average_accuracy"] for cell in tried)

    return max(STRENGTHS, key=accuracy)


# --- what came out -----------------------------------------------------------------------------------------------


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean and its standard error, of two values or more."""
    return statistics.mean(values), statistics.stdev(values) / sqrt(len(values))


def scores_table(results: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """A row per stream and arm: percent, the mean over seeds and their standard deviation."""

    def shown(values: Sequence[float]) -> str:
        spread = f" ({100 * statistics.stdev(values):.1f})" if len(values) > 1 else ""
        return f"{100 * statistics.mean(values):.1f}{spread}"

    rows = []
    for (stream, arm), runs in results.items():
        row: dict[str, Any] = {"stream": stream, "arm": arm, "seeds": len(runs)}
        for name in ("average_accuracy", "forgetting", "forward_transfer", "learning_accuracy"):
            joint = ARMS[arm].method == "joint" and name != "average_accuracy"
            row[f"{name.replace('_', ' ')} %"] = "" if joint else shown([run[name] for run in runs])
        strength = runs[0].get("strength")
        row["note"] = f"strength {strength:g}" if strength else ""
        rows.append(row)
    return rows


def verdicts(results: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]], ours: str) -> list[dict[str, Any]]:
    """`ours` beside every other arm of a stream: better or worse where the means differ by two standard errors.

    Arms of a single seed are left out, as they have none.
    """
    rows = []
    for (stream, arm), runs in results.items():
        if arm == ours or min(len(runs), len(results.get((stream, ours), []))) < 2:
            continue
        mine, other = ([run["average_accuracy"] for run in each] for each in (results[stream, ours], runs))
        (a, error_a), (b, error_b) = mean_and_error(mine), mean_and_error(other)
        difference, error = 100 * (a - b), 100 * sqrt(error_a**2 + error_b**2)
        verdict = "equal" if abs(difference) <= 2 * error else "better" if difference > 0 else "worse"
        rows.append(
            {
                "stream": stream,
                "arm": ours,
                "beside": arm,
                "difference, points": f"{difference:+.1f}",
                "standard error": f"{error:.1f}",
                "verdict": verdict,
            }
        )
    return rows


def drift_table(results: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Changes of task that were noticed in the loss before the next one, and alarms without a change."""
    rows = []
    for (stream, arm), runs in results.items():
        changes = found = false = 0
        delays = []
        for run in runs:
            starts = [] if ARMS[arm].method == "joint" else run["task_ends"][:-1]
            changes += len(starts)
            due = dict.fromkeys(starts, False)
            for alarm in run["drift_alarms"]:
                start = max((s for s in starts if s < alarm), default=None)
                if start is None or due[start]:
                    false += 1
                else:
                    due[start] = True
                    delays.append(alarm - start)
            found += sum(due.values())
        rows.append(
            {
                "stream": stream,
                "arm": arm,
                "changes": changes,
                "noticed": found,
                "steps until noticed, median": statistics.median(delays) if delays else "",
                "false alarms": false,
                "steps watched": sum(run["task_ends"][-1] for run in runs),
            }
        )
    return rows


def collect() -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Every cell that was trained, tuning apart, by stream and arm, in the order of `STREAMS` and `ARMS`."""
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(CELLS.glob("*.json"))]
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for stream in STREAMS:
        for arm in ARMS:
            chosen = [run for run in runs if (run["stream"], run["arm"]) == (stream, arm)]
            chosen = [run for run in chosen if run["seed"] not in TUNING_SEEDS]
            if arm == "elastic weights" and chosen:
                chosen = [run for run in chosen if run["strength"] == best_strength(stream)]
            if chosen:
                found[stream, arm] = sorted(chosen, key=lambda run: run["seed"])
    return found


def report() -> None:
    """Tables, the JSON file and the pictures."""
    results = collect()
    if not results:
        return
    watched = {key: runs for key, runs in results.items() if key[1] in ("fixed mixture", "joint mixture")}
    tried = [
        {"stream": stream, "strength": strength, "seed": seed, "average accuracy %": round(100 * accuracy, 1)}
        for stream, seed, strength in tuning(list(STREAMS))
        if (cell := Cell(stream=stream, arm="elastic weights", seed=seed, strength=strength)).file.exists()
        for accuracy in [cell.result()["average_accuracy"]]
    ]
    compared = verdicts(results, OURS)
    tables = {
        "": scores_table(results),
        "verdicts": compared,
        "tuning": tried,
        "drift": drift_table(watched),
    }
    facts = {
        "memory": MEMORY,
        "parameters": {arm: runs[0]["parameters"] for (_, arm), runs in results.items()},
        "matrices": {
            f"{stream}, {arm}, seed {run['seed']}": [[round(a, 4) for a in row] for row in run["accuracy_matrix"]]
            for (stream, arm), runs in results.items()
            for run in runs
            if stream in LEADING
        },
    }
    for name, rows in tables.items():
        if rows:
            write_report(record_of(name), rows, **(facts if not name else {}))
    write_page({name: rows for name, rows in tables.items() if rows})
    draw(results, ROOT / "docs" / "images")


def write_page(tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Put the tables, by their names, where `PAGE` has its marks."""
    parts = [
        f"**{TITLES[name]}**\n\n<!-- figures: {record_of(name)}.json -->\n{markdown(rows)}"
        for name, rows in tables.items()
    ]
    put_tables(PAGE, "learning/continual_learning.py", "\n".join(parts))


def record_of(name: str) -> str:
    return f"continual_learning_{name}".rstrip("_")


def draw(results: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]], folder: Path) -> None:
    """The curves of all leading streams, and the accuracy matrices of each."""
    curves: dict[str, dict[str, list[Any]]] = {}
    for (stream, arm), runs in results.items():
        if stream in LEADING and arm in PICTURED:
            curves.setdefault(stream, {})[arm] = [run["accuracy_matrix"] for run in runs]
    for stream, arms in curves.items():
        means = {arm: torch.tensor(matrices).mean(0).tolist() for arm, matrices in arms.items()}
        draw_accuracy_matrices(folder / f"continual_matrix_{stream}.png", means)
    if curves:
        draw_average_accuracies(folder / "continual_curves.png", curves)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=None, help="folder with MNIST; else $TOOLKIT_DATA_DIR")
    parser.add_argument("--streams", nargs="+", choices=STREAMS, default=[*LEADING, LONG])
    parser.add_argument("--arms", nargs="*", choices=ARMS, help="of each stream; none at all: only the tables")
    parser.add_argument("--seeds", type=int, default=5, help="how many")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    CELLS.mkdir(parents=True, exist_ok=True)
    arms = {stream: usual_arms(stream) if args.arms is None else args.arms for stream in args.streams}
    for cell in cells(arms, range(args.seeds)):
        if not cell.file.exists():
            write_json(cell.file, train(cell, args.data_dir))
    report()
