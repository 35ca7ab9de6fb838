"""Checkpoints do not care how experts were spread: what any layout saved, any other loads, and the run goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.support.equality import IN_FLOAT64, in_float64
from tests.support.helpers import run_distributed
from tests.test_parity import BATCH, EXPERTS, SAMPLES, Trace, TwoLayers, assert_equal_rows, by_id, place
from toolkit.data.batches import TrainBatches
from toolkit.data.table import TensorTable
from toolkit.experts.layer.losses import RouterPenalty
from toolkit.experts.layer.stack import expert_stacks
from toolkit.experts.moving import replan
from toolkit.experts.moving.replan_options import ReplanOptions
from toolkit.experts.parallel.groups import make_expert_groups
from toolkit.experts.parallel.ownership import ownership_of
from toolkit.experts.state import checkpoint_files
from toolkit.experts.state.manifest import read_manifest
from toolkit.run.config.experts import MoERunConfig
from toolkit.run.config.optimizer_options import OptimizerOptions
from toolkit.run.run import start_run
from toolkit.run.tracking.jsonl import read_metrics
from toolkit.train.callbacks.base import Callback
from toolkit.train.callbacks.checkpointing import Checkpointing
from toolkit.train.callbacks.expert_balance import BiasBalancing, WholeStepBalance
from toolkit.train.callbacks.expert_load import ExpertLoad
from toolkit.train.callbacks.replan import Replan
from toolkit.train.optim import build_optimizer, warmup_cosine
from toolkit.train.tasks.classification import Classification
from toolkit.train.trainer import Trainer

STEPS = 9
"""Of a run: two epochs and a step, so that each of five legs trains, and plans are made after steps 3, 6 and 9."""
Layout = tuple[int, int, str]
"""(processes, ep_size, placement), placements as in `tests.test_parity.place`."""

LAYOUTS: list[Layout] = [
    (1, 1, "blocks"),
    (1, 1, "spare"),
    (2, 1, "blocks"),
    (2, 2, "uneven"),
    (2, 2, "copies"),
    (4, 2, "shuffled"),
    (4, 4, "copies"),
]
PAIRS = list(product(LAYOUTS, LAYOUTS))


class StopAt(Callback):
    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.state.step == self.step:
            trainer.request_stop("far enough")


@contextmanager
def trainer_of(
    folder: Path,
    layout: Layout,
    balance: str,
    callbacks: Sequence[Callback],
    planner: str | None = None,
    ep_stride: int = 1,
    optimization: Callable[[nn.Module], tuple[torch.optim.Optimizer, Any]] | None = None,
    **settings: Any,
) -> Iterator[Trainer]:
    world, ep_size, placement = layout
    config = MoERunConfig(
        experts=EXPERTS,
        batch_size=BATCH,
        cpu=True,
        tracker="none",
        run_dir=folder,
        ep_size=ep_size,
        ep_stride=ep_stride,
        optimizer=OptimizerOptions(weight_decay=0.1),
        **settings,
    )
    with start_run("elastic", config) as run:
        assert run.world_size == world
        model = TwoLayers(make_expert_groups(ep_size, ep_stride=ep_stride), place(placement, ep_size), balance)
        draws = torch.Generator().manual_seed(1)
        table = TensorTable(
            input=torch.randn(SAMPLES, 12, generator=draws), label=torch.randint(5, (SAMPLES,), generator=draws)
        )
        replan = [] if planner is None else [Replan(model, ReplanOptions(planner=planner, every=3, guarded=False))]
        penalty = RouterPenalty(model, balance_weight=0.1 if balance == "loss" else 0.0, z_weight=0.01)
        optimizer: torch.optim.Optimizer = build_optimizer(model, config.replace(lr=3e-3))
        schedule: Any = warmup_cosine(max_steps=STEPS, warmup_steps=3)
        if optimization is not None:
            optimizer, schedule = optimization(model)
        yield Trainer(
            run,
            Classification(penalty=penalty),
            model,
            optimizer,
            TrainBatches(table, batch_size=BATCH, seed=0, rank=run.rank, world_size=run.world_size),
            max_steps=STEPS,
            schedule=schedule,
            max_grad_norm=0.5,
            log_every=config.log_every,
            callbacks=[WholeStepBalance(penalty), BiasBalancing(model), ExpertLoad(model), *replan, *callbacks],
        )


# --- every pair of layouts ----------------------------------------------------------------------------------------


def contents(trainer: Trainer) -> dict[str, Any]:
    """All that a checkpoint holds, as this rank has it, under names that do not depend on the layout."""
    tensors = by_id(trainer.raw_model, "weight") | {name: b.clone() for name, b in trainer.raw_model.named_buffers()}
    for name, parameter in trainer.raw_model.named_parameters():
        ownership = ownership_of(parameter)
        for key, value in trainer.optimizer.optimizer.state[parameter].items():
            if ownership is None:
                tensors[f"{name}.{key}"] = value.full_tensor() if isinstance(value, DTensor) else value.clone()
                continue
            for row, row_id in enumerate(ownership.row_ids):
                if ownership.owns[row]:
                    tensors[f"{name}/{row_id}.{key}"] = (value[row] if value.ndim else value).clone()
    load = next(c for c in trainer.callbacks if isinstance(c, ExpertLoad)).state_dict()
    return {
        "tensors": tensors,
        "load": (load["line"]["load_LE"], load["epoch_load"]),
        "position": (trainer.state.step, trainer.state.samples),
    }


def spoil(trainer: Trainer) -> None:
    """So that nothing is taken for loaded that was there before."""
    with torch.no_grad():
        for tensor in (*trainer.raw_model.parameters(), *trainer.raw_model.buffers()):
            tensor.fill_(torch.nan)
    trainer.optimizer.optimizer.state.clear()


def run_folder(folder: Path, layout: Layout) -> Path:
    return folder / "-".join(map(str, layout))


def save_all(folder: Path, layouts: list[Layout]) -> list[dict[str, Any]]:
    found = []
    for layout in layouts:
        with trainer_of(run_folder(folder, layout), layout, "bias", [StopAt(3)], log_every=1000) as trainer:
            trainer.fit()
            assert trainer.save() is not None
            found.append(contents(trainer))
    return found


def load_all(folder: Path, layouts: list[Layout]) -> dict[tuple[Layout, Layout], dict[str, Any]]:
    found = {}
    for after in layouts:
        with trainer_of(folder / "loading" / "-".join(map(str, after)), after, "bias", [], log_every=1000) as trainer:
            for before in LAYOUTS:
                spoil(trainer)
                trainer.restore(run_folder(folder, before) / "checkpoints" / "step-00000003")
                found[before, after] = contents(trainer)
    return found


@pytest.fixture(scope="module")
def loaded(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[dict[Layout, Any], dict[tuple[Layout, Layout], Any], dict[Layout, Any]]:
    """What each rank had when a layout saved, what each rank had when another had loaded that, and the manifests."""
    folder = tmp_path_factory.mktemp("elastic")
    worlds = {world: [layout for layout in LAYOUTS if layout[0] == world] for world in (1, 2, 4)}
    saved: dict[Layout, Any] = {}
    for world, layouts in worlds.items():
        ranks = run_distributed(save_all, world, folder, layouts, timeout_s=300)
        saved |= dict(zip(layouts, zip(*ranks, strict=True), strict=True))
    pairs: dict[tuple[Layout, Layout], Any] = {}
    for world, layouts in worlds.items():
        ranks = run_distributed(load_all, world, folder, layouts, timeout_s=300)
        pairs |= {pair: [rank[pair] for rank in ranks] for pair in ranks[0]}
    manifests = {
        layout: read_manifest(run_folder(folder, layout) / "checkpoints" / "step-00000003") for layout in LAYOUTS
    }
    return saved, pairs, manifests


def all_tensors(ranks: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Those of all ranks; what several have must be equal."""
    tensors: dict[str, Tensor] = {}
    for rank in ranks:
        for name, value in rank["tensors"].items():
            assert torch.equal(tensors.setdefault(name, value), value), f"ranks differ in {name}"
    return tensors


@pytest.mark.parametrize(("before", "after"), PAIRS, ids=lambda layout: "{}p-ep{}-{}".format(*layout))
def test_what_any_layout_saved_any_other_loads_without_a_difference(loaded: Any, before: Layout, after: Layout):
    saved, pairs, _ = loaded
    then, now = saved[before], pairs[before, after]
    expected, found = all_tensors(then), all_tensors(now)
    assert found.keys() == expected.keys()
    assert any(name.endswith("router.bias") for name in expected)
    assert any(name.endswith(f"/{EXPERTS - 1}.exp_avg_sq") for name in expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    for rank in now:
        assert rank["load"] == then[0]["load"]
        assert rank["position"] == then[0]["position"] == (3, 3 * BATCH)
    assert sum(map(sum, then[0]["load"][1])) == 3 * BATCH * (2 + 3), "every assignment was counted"


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "{}p-ep{}-{}".format(*layout))
def test_a_row_is_written_once_by_its_owner_and_where_all_copies_were_is_noted(loaded: Any, layout: Layout):
    about = loaded[2][layout]
    placement = place(layout[2], layout[1])
    for name, where in about["placement"].items():
        assert where["slots"] == [list(row) for row in placement.slots]
        written = {file: rows[name] for file, rows in about["rows"].items()}
        owners = {f"experts-{rank:05d}.safetensors": [] for rank in range(layout[1])}
        for expert in range(EXPERTS):
            owners[f"experts-{placement.owner(expert).rank:05d}.safetensors"].append(expert)
        assert {file: sorted(ids) for file, ids in written.items()} == owners


# --- a run that changes its size -----------------------------------------------------------------------------------

HSDP: dict[str, Any] = {"dense_parallel": "fsdp2", "fsdp_size": 2}
LEGS: list[tuple[Layout, int, dict[str, Any]]] = [
    ((2, 2, "spare"), 2, {}),
    ((4, 2, "copies"), 4, {"ep_stride": 2, **HSDP}),
    ((8, 4, "shuffled"), 6, {"ep_stride": 2, **HSDP, "fsdp_size": 4}),
    ((2, 2, "uneven"), 8, {}),
    ((1, 1, "blocks"), STEPS, {}),
]
"""A layout, the step at which the next one takes over, and settings. Dense parameters are cut on the way and joined."""


def train(
    folder: Path, layout: Layout, until: int, settings: dict[str, Any] | None = None
) -> tuple[list[float], dict[str, Tensor]]:
    trace = Trace()
    callbacks = [trace, StopAt(until), Checkpointing()]
    with (
        in_float64(),
        trainer_of(folder, layout, "loss", callbacks, log_every=1, **(settings or {})) as trainer,
    ):
        trainer.fit()
        return trace.losses, by_id(trainer.raw_model, "weight")


def test_a_run_that_goes_from_two_processes_to_four_eight_two_and_one_keeps_its_loss_curve(tmp_path: Path):
    ((expected, weights),) = run_distributed(train, 1, tmp_path / "whole", (1, 1, "blocks"), STEPS)
    losses: list[float] = []
    for layout, until, settings in LEGS:
        (leg, last), *_ = run_distributed(train, layout[0], tmp_path / "run", layout, until, settings, timeout_s=300)
        assert leg, f"{layout} trained no step"
        losses += leg
        assert len(losses) == until
    assert len(losses) == len(expected) == STEPS
    for found, wanted in zip(losses, expected, strict=True):
        assert abs(found - wanted) <= IN_FLOAT64 * abs(wanted)
    assert_equal_rows(last, weights, IN_FLOAT64)
    assert [line["step"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")] == list(range(1, STEPS + 1))


def replanned(folder: Path, layout: Layout, planner: str, until: int, **settings: Any) -> dict[str, Any]:
    """Losses, everything a checkpoint would hold, and where experts are, of a run that moves them every three steps."""
    trace = Trace()
    callbacks = [trace, StopAt(until), Checkpointing()]
    with in_float64(), trainer_of(folder, layout, "loss", callbacks, planner, log_every=1, **settings) as trainer:
        trainer.fit()
        placements = [stack.placement for stack in expert_stacks(trainer.raw_model).values()]
        return {"losses": trace.losses, "placements": placements} | contents(trainer)


def stop_and_go(folder: Path, layout: Layout, planner: str, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """A run of seven steps, and one that was stopped between two plans and continued."""
    whole = replanned(folder / "whole", layout, planner, 7, **settings)
    first = replanned(folder / "cut", layout, planner, 4, **settings)
    second = replanned(folder / "cut", layout, planner, 7, **settings)
    assert first["placements"] != [place(layout[2], layout[1])] * 2, "nothing had moved when it was stopped"
    return [whole, second | {"losses": first["losses"] + second["losses"]}]


@pytest.mark.parametrize(
    ("layout", "planner", "settings"),
    [((4, 2, "spare"), "lpt", {"ep_stride": 2, **HSDP}), ((4, 4, "copies"), "replicate", {})],
)
def test_a_run_that_moves_experts_continues_bit_for_bit_on_as_many_processes(layout, planner, settings, tmp_path: Path):
    for whole, cut in run_distributed(stop_and_go, layout[0], tmp_path, layout, planner, settings):
        assert cut["placements"] == whole["placements"]
        assert cut["losses"] == whole["losses"]
        assert cut["load"] == whole["load"]
        for name, value in whole["tensors"].items():
            assert torch.equal(cut["tensors"][name], value), name


def continued(folder: Path, layout: Layout, planner: str) -> tuple[Any, Any, int]:
    """Placements of a run that is stopped after a plan, those when it is continued, and what migrated in between."""
    first = replanned(folder, layout, planner, 4)
    migrated = []
    migrate = replan.migrate
    replan.migrate = lambda *args: migrated.append(args) or migrate(*args)
    try:
        second = replanned(folder, layout, planner, 5)
    finally:
        replan.migrate = migrate
    return first["placements"], second["placements"], len(migrated)


def test_a_continued_run_places_its_experts_before_it_reads_them_and_migrates_none(tmp_path: Path):
    layout: Layout = (2, 2, "spare")
    for then, now, migrated in run_distributed(continued, 2, tmp_path, layout, "replicate"):
        assert then == now != [place(layout[2], layout[1])] * 2
        assert migrated == 0


def test_a_run_that_moved_experts_goes_on_with_other_processes(tmp_path: Path):
    ((expected, _),) = run_distributed(train, 1, tmp_path / "whole", (1, 1, "blocks"), 7)
    first, *_ = run_distributed(replanned, 4, tmp_path / "run", (4, 4, "spare"), "replicate", 4)
    second, *_ = run_distributed(replanned, 2, tmp_path / "run", (2, 2, "spare"), "replicate", 7)
    for found, wanted in zip(first["losses"] + second["losses"], expected, strict=True):
        assert abs(found - wanted) <= IN_FLOAT64 * abs(wanted)


# --- tensors that are spread by other means ------------------------------------------------------------------------


def dense() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.BatchNorm1d(10), nn.Linear(10, 3))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, draw: int) -> None:
    model(torch.randn(8, 6, generator=torch.Generator().manual_seed(draw))).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    values = dict(model.state_dict())
    for name, parameter in model.named_parameters():
        values |= {f"{name}.{key}": value for key, value in optimizer.state[parameter].items()}
    return {name: v.full_tensor() if hasattr(v, "full_tensor") else v.clone() for name, v in values.items()}


def save_spread(folder: Path) -> dict[str, Tensor]:
    """FSDP2 on two ranks: save, spoil, load."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = dense()
    for layer in (model[0], model[3], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer, 0)
    then = whole(model, optimizer)
    checkpoint_files.save(folder, model, optimizer, {"spread": True})
    step(model, optimizer, 1)
    assert checkpoint_files.load(folder, model, optimizer) == {"spread": True}
    now = whole(model, optimizer)
    for name, value in then.items():
        assert torch.equal(now[name], value), name
    step(model, optimizer, 1)
    return then


def test_what_fsdp2_spreads_is_saved_whole_and_loaded_in_parts(tmp_path: Path):
    then, _ = run_distributed(save_spread, 2, tmp_path / "spread")
    model = dense()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    checkpoint_files.load(tmp_path / "spread", model, optimizer)
    now = whole(model, optimizer)
    assert now.keys() == then.keys()
    assert all(torch.equal(value, now[name]) for name, value in then.items())
