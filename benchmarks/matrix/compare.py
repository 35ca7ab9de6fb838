"""Three clipped AdamW steps of each path on two processes, compared with one process.

`make matrix` runs it and writes `docs/project/matrix.md`.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.matrix.paths import EXPERTS, LENGTH, PATHS, SAMPLES, VOCAB, OneProcess, all_in_float64, read, save_model
from benchmarks.support.processes import ROOT, run_distributed

PAGE = ROOT / "docs" / "project" / "matrix.md"
COLUMNS = ("loss", "gradients", "norm", "weights", "save", "load", "resume", "adapters")
STEPS, WORLD = 3, 2
LIBRARIES = ("torch", "transformers", "accelerate", "peft")

ANCHORS = {
    1: "fsdp2-divides-twice",
    2: "an-empty-tp_plan-raises",
    3: "the-flag-alone-shards-nothing",
    4: "sharded-models-are-not-saved",
    5: "adapters-of-sharded-experts",
    6: "nonzero-of-a-dtensor",
    7: "autoep-and-transformers-524",
    8: "autoep-clips-by-a-mean-of-norms",
}
"""Anchors of the reports by number."""
REPORTS: dict[str, dict[str, int]] = {
    "torch, FSDP2": {"save": 4},
    "torch, DTensor plan": {"save": 4, "adapters": 5},
    "torch, DTensor plan, eager": {"loss": 6, "adapters": 5},
    "transformers, the flag only": dict.fromkeys(
        ("loss", "gradients", "norm", "weights", "save", "resume", "adapters"), 3
    ),
    "transformers, one batch": {"loss": 2},
    "transformers, TP": {"adapters": 5},
    "transformers, FSDP2": {"loss": 1, "gradients": 1, "norm": 1, "weights": 1, "adapters": 5},
    "transformers, FSDP2, in float32": {"adapters": 5},
    "transformers, by hand": {"save": 4, "adapters": 5},
    "DeepSpeed, AutoEP": {"loss": 7},
    "DeepSpeed, AutoEP, mended": {"loss": 8, "gradients": 8, "norm": 8, "weights": 8},
}
"""Number of the report by path and column. Documented limits of a library, with an error, have no report."""

Cell = float | str
"""Largest relative difference, or the error message."""


@dataclass
class Step:
    """Results of a step, over all ranks."""

    loss: float
    gradients: dict[str, Tensor]
    norm: float
    weights: dict[str, Tensor]


def tokens(step: int) -> Tensor:
    """Return the global batch of a step, int64 (SAMPLES, LENGTH)."""
    return torch.randint(VOCAB, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(100 + step))


def take_step(path: OneProcess, number: int) -> Step:
    loss = path.backward(tokens(number))
    gradients = path.values(grads=True)
    norm = path.clip()
    path.optimizer.step()
    path.optimizer.zero_grad()
    return Step(loss, gradients, norm, path.values())


def attempt(work: Callable[[], Any]) -> Any:
    """Return the result of `work`, a float as the maximum over ranks, or the error message of any rank."""
    found: Any
    try:
        found = work()
    except Exception as error:
        found = sentence(error)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, found if isinstance(found, (str, float)) else None)
    errors = [each for each in every if isinstance(each, str)]
    if errors:
        return errors[0]
    return max(every) if isinstance(found, float) else found


def sentence(error: BaseException) -> str:
    if isinstance(error, AssertionError) and not str(error):
        return "AssertionError without a message"
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return re.sub(r"\s+", " ", text)


def apart(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest relative difference of any tensor; small norms are clamped, and a missing tensor gives 1."""
    small = 1e-2 * max(value.norm().item() for value in expected.values())
    if found.keys() != expected.keys():
        return 1.0
    distances = [
        (found[name] - value).norm().item() / max(value.norm().item(), small) for name, value in expected.items()
    ]
    return max(distance if distance == distance else float("inf") for distance in distances)


def judge(name: str, folder: Path) -> dict[str, Cell]:
    """Return the results of a path, by column."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    kind = PATHS[name]
    with all_in_float64() if kind.precision == torch.float64 else contextlib.nullcontext():
        start = folder / "start"
        reference = OneProcess(start)
        expected = [take_step(reference, number) for number in range(STEPS)]
        made = attempt(lambda: kind(start))
        if isinstance(made, str):
            return {"loss": made}
        found = train(made, folder, expected)
        return found | {"adapters": attempt(lambda: adapt(kind, folder))}


def train(path: Any, folder: Path, expected: list[Step]) -> dict[str, Cell]:
    steps: list[Step] = []

    def step(number: int) -> None:
        steps.append(take_step(path, number))

    found: dict[str, Cell] = {}
    for number in range(STEPS):
        if isinstance(error := attempt(partial(step, number)), str):
            return {"loss": error}
        if number == STEPS - 2:
            found["resume"] = attempt(lambda: path.save_state(folder / "state"))
    pairs = list(zip(steps, expected, strict=True))
    found["loss"] = attempt(lambda: max(abs(a.loss - b.loss) / abs(b.loss) for a, b in pairs))
    found["gradients"] = attempt(lambda: max(apart(a.gradients, b.gradients) for a, b in pairs))
    found["norm"] = attempt(lambda: max(abs(a.norm - b.norm) / b.norm for a, b in pairs))
    found["weights"] = attempt(lambda: max(apart(a.weights, b.weights) for a, b in pairs))
    if not isinstance(found["resume"], str):
        found["resume"] = attempt(lambda: resumed(type(path), folder, steps[-1]))
    found["save"] = attempt(lambda: path.save(folder / "saved"))
    if isinstance(found["save"], str):
        return found
    dist.barrier()
    loaded = attempt(lambda: {name: p.detach() for name, p in read(folder / "saved").named_parameters()})
    if isinstance(loaded, str):
        return found | {"save": loaded}
    found["save"] = attempt(lambda: apart(loaded, steps[-1].weights))
    found["load"] = attempt(lambda: apart(type(path)(folder / "saved").values(), loaded))
    return found


def resumed(kind: Any, folder: Path, expected: Step) -> float:
    """Return the difference of the last step's weights after resuming from a checkpoint before it."""
    dist.barrier()
    path = kind.resume(folder / "start", folder / "state")
    return apart(take_step(path, STEPS - 1).weights, expected.weights)


def adapt(kind: Any, folder: Path) -> float:
    """Return the largest difference of expert adapters and their gradients from one process, over two steps."""
    paths = OneProcess(folder / "start", adapters=True), kind(folder / "start", adapters=True)
    largest = 0.0
    for number in range(2):
        expected: dict[str, Tensor] = {}
        found: dict[str, Tensor] = {}
        for path, into in zip(paths, (expected, found), strict=True):
            path.backward(tokens(number))
            into.update({f"gradient of {name}": value for name, value in by_expert(path.values(grads=True)).items()})
            path.optimizer.step()
            path.optimizer.zero_grad()
            into.update(by_expert(path.values()))
        for prefix in ("gradient", "base"):
            several, one = ({n: v for n, v in each.items() if n.startswith(prefix)} for each in (found, expected))
            largest = max(largest, apart(several, one))
    return largest


def by_expert(adapters: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert adapters from PEFT's layout to (experts, rank, width) and (experts, width, rank), if needed."""
    found = {}
    for name, value in adapters.items():
        if value.ndim == 3:
            found[name] = value
        elif "lora_A" in name:
            found[name] = value.view(EXPERTS, -1, value.shape[1])
        else:
            found[name] = torch.stack([value[:, expert::EXPERTS] for expert in range(EXPERTS)])
    return found


def results(names: list[str]) -> dict[str, dict[str, Cell]]:
    """Return the results by path and column."""
    found = {}
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            save_model(Path(folder) / "start")
            found[name] = run_distributed(judge, WORLD, name, Path(folder), timeout_s=200)[0]
    return found


def cell(name: str, column: str, value: Cell) -> str:
    if value == "-":
        return "-"
    if not isinstance(value, str) and value <= PATHS[name].tolerance:
        return "yes"
    number = REPORTS.get(name, {}).get(column)
    report = f" ([{number}](upstream/README.md#{number}-{ANCHORS[number]}))" if number else ""
    if isinstance(value, str):  # the report has the full message
        value = value if len(value) < 80 else value[:77] + "..."
        return f"raises: {value.replace('|', '/')}{report}"
    return f"no: {value:.0e}{report}"


def line(name: str, cells: dict[str, Cell]) -> str:
    filled = [cell(name, column, cells.get(column, "-")) for column in COLUMNS]
    return f"| {name} | {' | '.join(filled)} |"


def bullet(name: str) -> str:
    path = PATHS[name]
    return f"- **{name}**: {path.note}{f' ({path.needs} {version(path.needs)})' if path.needs else ''}"


def page(rows: list[str], bullets: list[str]) -> str:
    versions = ", ".join(f"{library} {version(library)}" for library in LIBRARIES)
    table, notes = "\n".join(rows), "\n".join(bullets)
    return f"""# Parity of expert-parallel libraries

Written by `make matrix` with {versions}. A
Qwen3-MoE model of {EXPERTS} experts takes {STEPS} clipped AdamW steps on two gloo processes of a CPU, by each path,
and on one process with the global batch, in float64 if the path supports it.

- **loss**, **gradients** (full, before clipping), **norm** (used for clipping), **weights** (after the steps): yes if
  no tensor differs by more than 1e-8, in float32 1e-5, relative to its norm.
- **save**: `save_pretrained` writes files that unmodified `from_pretrained` reads as the path's weights.
- **load**: the path starts from the weights that it saved.
- **resume**: saved before the last step with the optimizer, by the library's own functions, and loaded again, the run
  ends with the same weights.
- **adapters**: PEFT's adapters of experts (`target_parameters`) get the gradients and take the steps of one process.
- **no** gives the largest relative difference, **raises** the first line of the error. **-**: not tried after an
  error. Numbers link to [reports](upstream/README.md), each with a minimal script and, if small, a fix.

| path | {" | ".join(COLUMNS)} |
|---|{"---|" * len(COLUMNS)}
{table}

{notes}

`make matrix` keeps the rows of libraries that are not installed. Megatron-Core and torchtitan are missing: they train
in their own loops. Axolotl 0.21.0 needs Python 3.12 and pins other versions: its rows were run with torch 2.13.0 and
transformers 5.20.1, and are the same with 5.24.0. Migration and trained replicas have no column: the other libraries
lack both.
"""


def existing() -> tuple[dict[str, str], dict[str, str]]:
    """Return the rows and the notes of the existing page, by path."""
    lines = PAGE.read_text().splitlines()
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in lines if line.startswith("| ")}
    notes = {line.partition("**: ")[0].removeprefix("- **"): line for line in lines if line.startswith("- **")}
    return rows, notes


if __name__ == "__main__":
    found = results([name for name, path in PATHS.items() if path.is_installed()])
    rows, notes = existing() if PAGE.exists() else ({}, {})
    rows |= {name: line(name, cells) for name, cells in found.items()}
    notes |= {name: bullet(name) for name in found}
    PAGE.write_text(page([rows[name] for name in PATHS], [notes[name] for name in PATHS]))
