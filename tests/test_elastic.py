"""Checkpoints of any layout load in any other layout, and the run continues."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import toolkit as tk
from benchmarks.support.precision import IN_FLOAT64, in_float64
from benchmarks.support.processes import run_distributed
from tests.parity.layouts import place
from tests.parity.outcome import rows_by_id
from tests.support.equality import assert_equal_rows
from tests.support.trainers import in_hook
from toolkit.data.batches import TrainBatches
from toolkit.experts.layer.router_options import RouterOptions
from toolkit.experts.placement.placement import ExpertPlacement
from toolkit.experts.state.manifest import read_manifest
from toolkit.train.callbacks.checkpointing import Checkpointing
from toolkit.train.callbacks.expert_balance import BiasBalancing, WholeStepBalance
from toolkit.train.callbacks.expert_load import ExpertLoad
from toolkit.train.callbacks.replan import Replan
from toolkit.train.optim import warmup_cosine

SAMPLES, BATCH, EXPERTS = 58, 16, 8
"""58 samples in batches of 16: three full ones and one of 10, which leaves some ranks fewer samples."""
STEPS = 9
"""Two epochs and a step, with plans after steps 3, 6 and 9."""
Layout = tuple[int, int, str]
"""World size, ep_size, and name of a placement of `tests.parity.layouts.place`."""

LAYOUTS: list[Layout] = [
    (1, 1, "contiguous"),
    (1, 1, "spare"),
    (2, 1, "contiguous"),
    (2, 2, "uneven"),
    (2, 2, "replicas"),
    (4, 2, "shuffled"),
    (4, 4, "replicas"),
]


class TwoLayers(nn.Module):
    """Two MoE layers, one with a shared expert, between dense layers."""

    def __init__(self, groups: tk.experts.ExpertGroups, placement: ExpertPlacement, balance: str):
        super().__init__()
        torch.manual_seed(0)
        router = RouterOptions(balance="bias" if balance == "bias" else "loss")
        sharded: dict[str, Any] = {"groups": groups, "placement": placement, "router": router}
        self.stem = nn.Linear(12, 16)
        self.first = tk.experts.make_moe(16, 24, EXPERTS, 2, **sharded, shared_expert=nn.Linear(16, 16))
        self.second = tk.experts.make_moe(16, 12, EXPERTS, 3, **sharded, activation="swiglu", seed=1)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).tanh()
        x = x + self.first(x)
        return self.head(x + self.second(x))


class Trace(tk.Callback):
    """Loss and gradient norm of each step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []

    def on_step_end(self, trainer: tk.Trainer) -> None:
        sums = trainer.sums.compute()
        self.losses.append(sums["loss"] + sums["penalty"])
        self.norms.append(float(trainer._recorded["train/grad_norm"]))


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Return this rank's parameters by name, and rows of experts by name and id."""
    owned, replicas = rows_by_id(model, lambda p: p.detach())
    return owned | replicas


def placement_of(layout: Layout) -> ExpertPlacement:
    return place(layout[2], EXPERTS, layout[1])


HSDP: dict[str, Any] = {"dense_parallel": "fsdp2", "fsdp_size": 2}
SETTINGS: dict[Layout, dict[str, Any]] = {(4, 2, "shuffled"): HSDP}


def stop_at(step: int) -> tk.Callback:
    return in_hook("on_step_end", lambda trainer: trainer.request_stop("SIGTERM"), step)


@contextmanager
def trainer_of(
    folder: Path,
    layout: Layout,
    balance: str,
    callbacks: Sequence[tk.Callback],
    planner: str | None = None,
    ep_stride: int = 1,
    optimization: Callable[[nn.Module], tuple[torch.optim.Optimizer, Any]] | None = None,
    **settings: Any,
) -> Iterator[tk.Trainer]:
    world, ep_size, _ = layout
    config = tk.MoERunConfig(
        experts=EXPERTS,
        batch_size=BATCH,
        cpu=True,
        tracker="none",
        run_dir=folder,
        ep_size=ep_size,
        ep_stride=ep_stride,
        optimizer=tk.OptimizerOptions(weight_decay=0.1),
        **settings,
    )
    with tk.start_run("elastic", config) as run:
        assert run.world_size == world
        groups = tk.experts.make_expert_groups(ep_size, ep_stride=ep_stride)
        model = TwoLayers(groups, placement_of(layout), balance)
        draws = torch.Generator().manual_seed(1)
        table = tk.TensorTable(
            input=torch.randn(SAMPLES, 12, generator=draws), label=torch.randint(5, (SAMPLES,), generator=draws)
        )
        options = tk.experts.ReplanOptions(planner=planner, every=3, guarded=False)
        replan = [Replan(options)] if planner else []
        penalty = tk.experts.RouterPenalty(model, balance_weight=0.1 if balance == "loss" else 0.0, z_weight=0.01)
        if optimization is None:
            optimizer = tk.build_optimizer(model, config.replace(lr=3e-3))
            schedule = warmup_cosine(max_steps=STEPS, warmup_steps=3)
        else:
            optimizer, schedule = optimization(model)
        yield tk.Trainer(
            run,
            tk.Classification(penalty=penalty),
            model,
            optimizer,
            TrainBatches(table, batch_size=BATCH, seed=0, rank=run.rank, world_size=run.world_size),
            max_steps=STEPS,
            schedule=schedule,
            max_grad_norm=0.5,
            log_every=config.log_every,
            callbacks=[
                WholeStepBalance(penalty),
                BiasBalancing(),
                ExpertLoad(),
                *replan,
                *callbacks,
            ],
        )


def trainer_in(folder: Path, layout: Layout, *callbacks: tk.Callback) -> AbstractContextManager[tk.Trainer]:
    settings = SETTINGS.get(layout, {})
    return trainer_of(run_folder(folder, layout), layout, "bias", callbacks, log_every=1000, **settings)


def contents(trainer: tk.Trainer) -> dict[str, Any]:
    """Return everything in a checkpoint as this rank has it, under names that do not depend on the layout."""
    model, states = trainer.raw_model, trainer.optimizer.optimizer.state
    tensors = weights_of(model) | {name: buffer.clone() for name, buffer in model.named_buffers()}
    for key in ("step", "exp_avg", "exp_avg_sq"):
        tensors |= rows_by_id(model, lambda p, key=key: states[p][key], f".{key}")[0]
    load = next(c for c in trainer.callbacks if isinstance(c, ExpertLoad)).state_dict()
    return {
        "tensors": tensors,
        "load": (load["line"]["load_LE"], load["epoch_load"]),
        "position": (trainer.state.step, trainer.state.samples),
    }


def run_folder(folder: Path, layout: Layout) -> Path:
    return folder / "-".join(map(str, layout))


def checkpoint_of(folder: Path, layout: Layout) -> Path:
    return run_folder(folder, layout) / "checkpoints" / "step-00000003"


def save_all(folder: Path, layouts: list[Layout]) -> list[dict[str, Any]]:
    found = []
    for layout in layouts:
        with trainer_in(folder, layout, stop_at(3)) as trainer:
            trainer.fit()
            assert trainer.save() is not None
            found.append(contents(trainer))
    return found


def load_all(folder: Path, layouts: list[Layout]) -> dict[tuple[Layout, Layout], dict[str, Any]]:
    found = {}
    for after in layouts:
        with trainer_in(folder / "loading", after) as trainer:
            for before in LAYOUTS:
                model, states = trainer.raw_model, trainer.optimizer.optimizer.state.values()
                moments = [value for state in states for value in state.values()]
                with torch.no_grad():
                    for tensor in (*model.parameters(), *model.buffers(), *moments):
                        tensor.fill_(torch.nan)
                trainer.restore(checkpoint_of(folder, before))
                found[before, after] = contents(trainer)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("elastic")


@pytest.fixture(scope="module")
def saved_and_loaded(folder: Path) -> tuple[dict[Layout, Any], dict[tuple[Layout, Layout], Any]]:
    """Contents on each rank when a layout saved, and when another layout had loaded its checkpoint."""
    worlds = {world: [layout for layout in LAYOUTS if layout[0] == world] for world in (1, 2, 4)}
    saved, loaded = {}, {}
    for world, layouts in worlds.items():
        saved |= zip(layouts, zip(*run_distributed(save_all, world, folder, layouts), strict=True), strict=True)
    for world, layouts in worlds.items():
        ranks = run_distributed(load_all, world, folder, layouts)
        loaded |= {pair: [rank[pair] for rank in ranks] for pair in ranks[0]}
    return saved, loaded


def all_tensors(ranks: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for rank in ranks:
        for name, value in rank["tensors"].items():
            assert torch.equal(tensors.setdefault(name, value), value), f"ranks differ in {name}"
    return tensors


def layout_id(layout: Layout) -> str:
    return "{}p-ep{}-{}".format(*layout)


@pytest.mark.parametrize(("before", "after"), list(product(LAYOUTS, LAYOUTS)), ids=layout_id)
def test_checkpoint_of_any_layout_loads_bitwise_in_any_other(saved_and_loaded: Any, before: Layout, after: Layout):
    saved, loaded = saved_and_loaded
    expected, found = all_tensors(saved[before]), all_tensors(loaded[before, after])
    assert found.keys() == expected.keys()
    assert any(name.endswith("router.bias") for name in expected)
    assert any(name.endswith(f".exp_avg_sq/{EXPERTS - 1}") for name in expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    first = saved[before][0]
    for rank in loaded[before, after]:
        assert rank["load"] == first["load"]
        assert rank["position"] == first["position"] == (3, 3 * BATCH)
    assert sum(map(sum, first["load"][1])) == 3 * BATCH * (2 + 3), "(token, expert) pairs are missing"


@pytest.mark.usefixtures("saved_and_loaded")
@pytest.mark.parametrize("layout", LAYOUTS, ids=layout_id)
def test_checkpoint_has_each_row_once_and_the_slots_of_all_replicas(folder: Path, layout: Layout):
    manifest, placement = read_manifest(checkpoint_of(folder, layout)), placement_of(layout)
    owners = {f"experts-{rank:05d}.safetensors": [] for rank in range(layout[1])}
    for expert in range(EXPERTS):
        owners[f"experts-{placement.owner(expert).rank:05d}.safetensors"].append(expert)
    for name, saved in manifest["placement"].items():
        assert saved["slots"] == [list(row) for row in placement.slots]
        assert {file: sorted(rows[name]) for file, rows in manifest["rows"].items()} == owners


LEGS: list[tuple[Layout, int, dict[str, Any]]] = [
    ((2, 2, "spare"), 2, {}),
    ((4, 2, "replicas"), 4, {"planner": "replicate", "ep_stride": 2, **HSDP}),
    ((4, 4, "shuffled"), 5, {**HSDP, "fsdp_size": 4}),
    ((2, 2, "spare"), 8, {"planner": "replicate"}),
    ((1, 1, "contiguous"), STEPS, {}),
]
"""Layout, last step, and settings."""


def train(folder: Path, layout: Layout, until: int, planner: str | None = None, **settings: Any) -> dict[str, Any]:
    """Train in float64 to step `until`, and return losses and weights."""
    trace = Trace()
    callbacks = [trace, stop_at(until), Checkpointing()]
    with in_float64(), trainer_of(folder, layout, "loss", callbacks, planner, log_every=1, **settings) as trainer:
        trainer.fit()
        return {
            "losses": trace.losses,
            "weights": weights_of(trainer.raw_model),
        }


@pytest.fixture(scope="module")
def single(folder: Path) -> dict[str, Any]:
    return run_distributed(train, 1, folder / "single", (1, 1, "contiguous"), STEPS)[0]


def test_run_resumed_at_other_world_sizes_with_migrations_equals_one_process(single: dict[str, Any], tmp_path: Path):
    losses: list[float] = []
    for layout, until, settings in LEGS:
        leg, *_ = run_distributed(partial(train, **settings), layout[0], tmp_path, layout, until)
        losses += leg["losses"]
        assert len(losses) == until
    assert losses == pytest.approx(single["losses"], rel=IN_FLOAT64, abs=0)
    assert_equal_rows(leg["weights"], single["weights"], IN_FLOAT64)
    assert [line["step"] for line in tk.read_metrics(tmp_path / "metrics.jsonl")] == list(range(1, STEPS + 1))
