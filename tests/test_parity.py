"""Many processes equal one: the same losses, gradients, norms and weights, step by step.

Six AdamW steps in float64, over an epoch and a half, whose last batch is short (so some ranks get an empty
micro-batch), clipped, with balance and z-loss, against one process with the same seed. Each world runs all its cases
in one launch. On GPUs (`make test-gpu`) each process has its own, or all share one, as `tests.support.gpu` says.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from benchmarks.support.precision import relative_difference
from benchmarks.support.processes import run_distributed
from tests.support.equality import assert_equal_rows, replicas_agree
from tests.support.gpu import skip_without_gpus, use_gpu
from tests.support.placements import by_slot
from toolkit.data.batches import TrainBatches
from toolkit.data.table import TensorTable
from toolkit.experts.layer.losses import RouterPenalty
from toolkit.experts.layer.moe_layer import make_moe
from toolkit.experts.layer.router_options import RouterOptions
from toolkit.experts.parallel.groups import ExpertGroups, make_expert_groups
from toolkit.experts.parallel.ownership import is_owned, ownership_of
from toolkit.experts.placement.placement import EMPTY_ROW, ExpertPlacement, contiguous, with_spare_slots
from toolkit.run.config.experts import MoERunConfig
from toolkit.run.config.optimizer_options import OptimizerOptions
from toolkit.run.run import start_run
from toolkit.train.callbacks.base import Callback
from toolkit.train.callbacks.expert_balance import WholeStepBalance
from toolkit.train.models.mlp import MLP
from toolkit.train.optim import build_optimizer, warmup_cosine
from toolkit.train.tasks.classification import Classification
from toolkit.train.trainer import Trainer

SAMPLES, BATCH, STEPS, EXPERTS = 58, 16, 6, 8
"""58 samples in batches of 16: three full ones and one of 10, which leaves 6 of 16 pieces empty."""


@dataclass(frozen=True)
class Case:
    """How a run is spread."""

    processes: int
    ep_size: int = 1
    """1 copies the experts; 2 on 4 processes makes two groups."""
    accumulation: int = 1
    placement: str = "blocks"
    """As `place` has it."""
    layout: str = "ddp"
    """ddp has replicated dense parameters and EP groups of neighbours; of hsdp, two sets of ranks have all shards of
    them; strided: EP groups of ranks as far apart as can be; crossed: first with last, and so on inwards; by node: rows
    go once to each of two nodes."""
    dtype: torch.dtype = torch.float64
    balance: str = "loss"
    recompute: bool = False
    """Of the first mixture all is recomputed, of the second the hidden activations."""

    def __str__(self) -> str:
        words = (f"{self.processes} processes", f"EP {self.ep_size}", f"{self.accumulation} micro-batches")
        words += ("recomputed",) * self.recompute
        return " ".join((*words, self.placement, self.layout, str(self.dtype).removeprefix("torch.")))

    @property
    def launch(self) -> tuple[int, bool]:
        """Cases that are equal in this share a launch: of so many processes, with dense parameters sharded or not."""
        return self.processes, "hsdp" in self.layout


CASES = [
    Case(1, accumulation=4),
    Case(1, placement="spare"),
    Case(2, accumulation=4),
    Case(2, 2, 1, "shuffled"),
    Case(2, 2, 4, "uneven", recompute=True),
    Case(2, 2, 4, "copies"),
    Case(4, 4),
    Case(4, 2, 1, "copies"),
    Case(4, 4, 4, "copies"),
    Case(4, 2, 4, "spare", recompute=True),
    Case(4, 2, 1, "shuffled", "hsdp"),
    Case(4, 2, 2, "copies", "strided hsdp"),
    Case(4, 4, 1, "uneven", "hsdp"),
    Case(4, 4, 1, "copies", "by node"),
    Case(4, 2, 2, "uneven"),
    Case(4, 4, 1, "uneven", "by node"),
    Case(4, 2, 1, "uneven", "crossed"),
    Case(8, 4, 1, "copies", "strided by node"),
]
FLOAT32 = [replace(case, dtype=torch.float32) for case in (Case(1, accumulation=4), Case(2, 2, 4, "copies"))]
BALANCED_BY_BIAS = [Case(world, world, balance="bias") for world in (1, 2, 4)]
EVERY_CASE = [Case(1), Case(1, dtype=torch.float32), *CASES, *FLOAT32, *BALANCED_BY_BIAS]

DTYPES = {torch.float64: (1e-10, STEPS, 1.0), torch.float32: (1e-6, 4, 0.0)}
"""Largest relative difference allowed, in norm; steps, of which the fourth has the short batch; and what the schedule
is multiplied with. Updates would make more of the rounding errors of float32, so weights stay there."""


def place(name: str, ranks: int) -> ExpertPlacement:
    """Equal blocks; equal counts in any order; 5 experts on rank 0 and the rest spread evenly; two empty slots a rank;
    or the last expert's first copy on rank 0, experts 0 and 1 on every rank, and an empty slot."""
    order = torch.randperm(EXPERTS, generator=torch.Generator().manual_seed(3)).tolist()
    if name == "shuffled":
        return by_slot(order, ranks)
    if name == "uneven":
        return ExpertPlacement((tuple(order[:5]), *(tuple(order[5 + r :: ranks - 1]) for r in range(ranks - 1))))
    blocks = contiguous(EXPERTS, ranks)
    if name == "copies":
        rows = [(*row, *(e for e in (0, 1) if e not in row), EMPTY_ROW) for row in blocks.slots]
        return ExpertPlacement(((*rows[0][:-1], EXPERTS - 1), *rows[1:]))
    return with_spare_slots(blocks, 2) if name == "spare" else blocks


def make_groups(ep_size: int, layout: str) -> ExpertGroups:
    world = dist.get_world_size() if dist.is_initialized() else 1
    if layout == "crossed":
        return make_expert_groups(ranks=[[rank, world - 1 - rank] for rank in range(world // 2)])
    options: dict[str, Any] = {"ep_stride": world // ep_size if "strided" in layout else 1}
    if "by node" not in layout:
        return make_expert_groups(ep_size, **options)
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=str(world // 2)):
        return make_expert_groups(ep_size, **options, exchange="hierarchical")


def place_in_group(rank: int, world: int, ep_size: int, layout: str) -> int:
    """The index in its EP group of `rank`."""
    return rank * ep_size // world if "strided" in layout or layout == "crossed" else rank % ep_size


class TwoLayers(nn.Module):
    """Two mixtures with a shared expert between dense layers."""

    def __init__(self, groups: ExpertGroups, placement: ExpertPlacement, balance: str, *, recompute: bool = False):
        super().__init__()
        torch.manual_seed(0)
        router = RouterOptions(balance="bias" if balance == "bias" else "loss")
        spread: dict[str, Any] = {"groups": groups, "placement": placement, "router": router}
        full, selective = ("full", "selective") if recompute else ("none", "none")
        self.stem = nn.Linear(12, 16)
        self.first = make_moe(16, 24, EXPERTS, 2, **spread, shared_expert=MLP(16, 8, 16), recompute=full)
        self.second = make_moe(16, 12, EXPERTS, 3, **spread, activation="swiglu", seed=1, recompute=selective)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).tanh()
        x = x + self.first(x)
        return self.head(x + self.second(x))


class Trace(Callback):
    """Everything that must not depend on the number of processes, under names that do not either."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.grads: list[dict[str, Tensor]] = []

    def on_before_optimizer_step(self, trainer: Trainer) -> None:
        self.grads.append(by_id(trainer.raw_model, "grad"))

    def on_step_end(self, trainer: Trainer) -> None:
        sums = trainer.sums.compute()
        self.losses.append(sums["loss"] + sums["penalty"])
        self.norms.append(float(trainer._recorded["train/grad_norm"]))


def by_id(model: nn.Module, what: str) -> dict[str, Tensor]:
    """This rank's parameters (or gradients), on the CPU: copied ones by name, expert rows by name and expert id."""
    rows: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        value = parameter.grad if what == "grad" else parameter.detach()
        value = (value.full_tensor() if isinstance(value, DTensor) else value.clone()).cpu()
        ownership = ownership_of(parameter)
        if ownership is None:
            rows[name] = value
        else:
            for row_id, row, owns in zip(ownership.row_ids, value, ownership.owns, strict=True):
                if what == "grad" and row_id != EMPTY_ROW and not owns:
                    assert not row.any(), "the gradient of a copy counts at its owner"
                elif row_id != EMPTY_ROW:
                    rows[f"{name}/{row_id}"] = row
    return rows


def train(folder: Path, case: Case) -> dict[str, Any]:
    """On the CPU, or on the GPU that `use_gpu` took."""
    _, steps, factor = DTYPES[case.dtype]
    schedule = warmup_cosine(max_steps=STEPS, warmup_steps=3)
    config = MoERunConfig(
        batch_size=BATCH,
        gradient_accumulation_steps=case.accumulation,
        cpu=os.environ["ACCELERATE_USE_CPU"] == "true",
        log_every=1,
        tracker="none",
        run_dir=folder / f"{case} {case.balance}",
        optimizer=OptimizerOptions(weight_decay=0.1),
        **({"dense_parallel": "fsdp2", "fsdp_size": dist.get_world_size() // 2} if "hsdp" in case.layout else {}),
    )
    with start_run("parity", config) as run:
        groups = make_groups(case.ep_size, case.layout)
        placement = place(case.placement, case.ep_size)
        model = TwoLayers(groups, placement, case.balance, recompute=case.recompute).to(case.dtype)
        draws = torch.Generator().manual_seed(1)
        table = TensorTable(
            input=torch.randn(SAMPLES, 12, dtype=case.dtype, generator=draws),
            label=torch.randint(5, (SAMPLES,), generator=draws),
        )
        penalty = RouterPenalty(model, balance_weight=0.1, z_weight=0.01)
        trace = Trace()
        trainer = Trainer(
            run,
            Classification(penalty=penalty),
            model,
            build_optimizer(model, config.replace(lr=3e-3)),
            TrainBatches(
                table,
                batch_size=BATCH,
                seed=0,
                accumulation=case.accumulation,
                rank=run.rank,
                world_size=run.world_size,
                device=run.device,
            ),
            max_steps=steps,
            schedule=lambda step: factor * schedule(step),
            max_grad_norm=0.5,
            log_every=1,
            callbacks=[WholeStepBalance(penalty), trace],
        )
        trainer.fit()
        return {
            "losses": torch.tensor(trace.losses, dtype=torch.float64),
            "norms": torch.tensor(trace.norms, dtype=torch.float64),
            "grads": trace.grads,
            "weights": by_id(model, "weight"),
            "owned": sorted(name for name, p in model.named_parameters() if is_owned(p)),
            "agree": replicas_agree(model),
        }


def train_all(folder: Path, device: str, cases: list[Case]) -> list[dict[str, Any]]:
    if device == "gpu":
        use_gpu()
    return [train(folder, case) for case in cases]


class Traces:
    """What each rank recorded, by case. A launch runs its cases when the first of them is asked for."""

    def __init__(self, folder: Path, device: str):
        self.folder, self.device = folder, device
        self.found: dict[Case, list[dict[str, Any]]] = {}

    def __getitem__(self, case: Case) -> list[dict[str, Any]]:
        if case not in self.found:
            if case.launch[1] and self.device == "gpu":
                skip_without_gpus(case.processes)
            cases = [other for other in EVERY_CASE if other.launch == case.launch]
            ranks = run_distributed(train_all, case.processes, self.folder, self.device, cases)
            self.found |= {other: list(found) for other, *found in zip(cases, *ranks, strict=True)}
        return self.found[case]


DEVICES = ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module", params=DEVICES)
def traces(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Traces:
    return Traces(tmp_path_factory.mktemp("parity"), request.param)


def gathered(ranks: list[dict[str, Any]], key: str, step: int | None = None) -> dict[str, Tensor]:
    """The rows of all ranks in one dictionary; those that several ranks have are equal."""
    rows: dict[str, Tensor] = {}
    for rank in ranks:
        for name, row in (rank[key] if step is None else rank[key][step]).items():
            assert name not in rows or torch.equal(rows[name], row), f"copies of {name} differ"
            rows[name] = row
    return rows


@pytest.mark.parametrize("case", [*CASES, *FLOAT32], ids=str)
def test_a_run_does_not_depend_on_how_it_is_spread(traces: Traces, case: Case):
    tolerance, steps, _ = DTYPES[case.dtype]
    (reference,) = traces[Case(1, dtype=case.dtype)]
    ranks = traces[case]
    for rank in ranks:
        assert relative_difference(rank["losses"], reference["losses"]) < tolerance
        assert relative_difference(rank["norms"], reference["norms"]) < tolerance
    for step in range(steps):
        assert_equal_rows(gathered(ranks, "grads", step), reference["grads"][step], tolerance)
    assert_equal_rows(gathered(ranks, "weights"), reference["weights"], tolerance)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_experts_are_owned_where_ep_size_says_so_and_copies_stay_equal(traces: Traces, case: Case):
    ranks = traces[case]
    for number, rank in enumerate(ranks):
        assert rank["agree"], "copies or replicas drifted apart"
        assert len(rank["owned"]) == (4 if case.ep_size > 1 else 0)
        here = place_in_group(number, case.processes, case.ep_size, case.layout)
        held = {int(name.rpartition("/")[2]) for name in rank["weights"] if name.startswith("first.experts.up/")}
        assert held == set(place(case.placement, case.ep_size).slots[here]) - {EMPTY_ROW}
    assert len(ranks) == case.processes


def test_bias_balancing_does_not_depend_on_the_number_of_processes(traces: Traces):
    alone, *spread = BALANCED_BY_BIAS
    (reference,) = traces[alone]
    for case in spread:
        assert_equal_rows(gathered(traces[case], "weights"), reference["weights"], 1e-10)


@pytest.mark.gpu
def test_a_gpu_finds_what_a_cpu_finds(tmp_path: Path):
    on_cpu, on_gpu = (Traces(tmp_path, device)[Case(1)][0] for device in ("cpu", "gpu"))
    for key in ("losses", "norms"):
        assert relative_difference(on_gpu[key], on_cpu[key]) < 1e-9
    assert_equal_rows(on_gpu["weights"], on_cpu["weights"], 1e-9)
