"""ExpertParallel in a plain Accelerate loop: every layout equals one process."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.state import AcceleratorState
from accelerate.utils import GradientAccumulationPlugin
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.support.precision import relative_difference
from benchmarks.support.processes import run_distributed
from tests.support.equality import assert_equal_rows
from tests.support.placements import by_slot
from toolkit.errors import UserError
from toolkit.experts.layer.moe_layer import make_moe
from toolkit.experts.moving.replan_options import ReplanOptions
from toolkit.experts.parallel.groups import make_expert_groups
from toolkit.experts.parallel.ownership import ownership_of
from toolkit.experts.placement.placement import EMPTY_ROW, ExpertPlacement, contiguous
from toolkit.integrations.accelerate.expert_parallel import SHARD_THEMSELVES, ExpertParallel
from toolkit.train.callbacks.expert_load import ExpertLoad

DIM, EXPERTS, TOP_K, BATCH, STEPS = 8, 8, 2, 16, 3


class StackedExperts(nn.Module):
    """What a user may have written: stacked tensors and a loop, biases included."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, DIM, 12) * 0.3)
        self.up_bias = nn.Parameter(torch.randn(EXPERTS, 12) * 0.1)
        self.down = nn.Parameter(torch.randn(EXPERTS, 12, DIM) * 0.3)

    def forward(self, hidden: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden)
        for expert in range(self.num_experts):
            token, choice = (expert_ids == expert).nonzero(as_tuple=True)
            y = (hidden[token] @ self.up[expert] + self.up_bias[expert]).relu() @ self.down[expert]
            out = out.index_add(0, token, y * weights[token, choice, None])
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate, self.experts = nn.LayerNorm(DIM), nn.Linear(DIM, EXPERTS, bias=False), StackedExperts()

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        weights, ids = self.gate(h).softmax(-1).topk(TOP_K)
        return x + self.experts(h, ids, weights)


class Model(nn.Module):
    def __init__(self, skew: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(5, DIM)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(DIM, 3)
        if skew:  # all tokens to the same two experts: some ranks get none
            with torch.no_grad():
                for block in self.blocks:
                    block.norm.bias += 1
                    block.gate.weight[:2] += 0.5

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).tanh()
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def place(kind: str) -> Any:
    """By name: all on rank 0; in any order; 4 on rank 0; experts 0 and 1 on every rank; the last expert on all ranks
    but the last two and its own, so three copies on four ranks."""
    if kind == "blocks":
        return "contiguous"

    def placement(layer: str, experts: int, ranks: int) -> ExpertPlacement:
        order = torch.randperm(experts, generator=torch.Generator().manual_seed(len(layer))).tolist()
        if kind == "one rank":
            return ExpertPlacement((tuple(order), *[()] * (ranks - 1)))
        if kind == "shuffled" or ranks == 1:
            return by_slot(order, ranks)
        if kind == "uneven":
            return ExpertPlacement((tuple(order[:4]), *(tuple(order[4 + r :: ranks - 1]) for r in range(ranks - 1))))
        blocks = contiguous(experts, ranks)
        hot = (0, 1) if kind == "copies" else (experts - 1,)
        rows = [(*row, *(e for e in hot if e not in row)) for row in blocks.slots]
        return ExpertPlacement((*rows[:-2], blocks.slots[-2], rows[-1]) if kind == "three" else tuple(rows))

    return placement


def by_id(model: nn.Module, value_of: Any) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        value = value_of(parameter)
        value = value.full_tensor() if isinstance(value, DTensor) else value
        ownership = ownership_of(parameter)
        if ownership is None:
            found[name] = value.clone()
            continue
        for row, (row_id, owns) in enumerate(zip(ownership.row_ids, ownership.owns, strict=True)):
            if owns:
                found[f"{name}/{row_id}"] = value[row].clone()
            elif row_id != EMPTY_ROW:
                found[f"{name}/{row_id} copy"] = value[row].clone()
    return found


def train(options: dict[str, Any]) -> dict[str, Any]:
    """A plain loop; `options`: dtype, accumulation, skew, placement, bf16, arguments of `make_expert_groups`, and the
    rest for ExpertParallel."""
    options = dict(options)
    if groups := options.pop("groups", None):
        options["groups"] = make_expert_groups(**groups)
    dtype, accumulation = options.pop("dtype", torch.float64), options.pop("accumulation", 1)
    skew, kind, autocast = options.pop("skew", False), options.pop("placement", "blocks"), options.pop("bf16", False)
    AcceleratorState._reset_state()  # cases of one launch differ in precision
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="bf16" if autocast else "no",
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=accumulation, sync_with_dataloader=False),
    )
    model = Model(skew).to(dtype)
    # Updates would make more of the rounding errors of float32 and bf16: weights stay, wherever they move.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02 if dtype is torch.float64 else 0.0, weight_decay=0.1)
    experts = ExpertParallel(accelerator, placement=place(kind), **options)
    model, optimizer = experts.prepare(model, optimizer)
    raw = accelerator.unwrap_model(model)
    draws = torch.Generator().manual_seed(1)
    losses, norms, gradients = [], [], []
    for _ in range(STEPS):
        x = torch.randn(BATCH, 5, dtype=dtype, generator=draws)
        y = torch.randint(3, (BATCH,), generator=draws)
        # Ragged: rank 0 has as many rows as the others together, so that means must be weighted.
        mine = shares(accumulation)
        total = 0.0
        for rows in mine:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x[rows]), y[rows], reduction="sum")
                accelerator.backward(loss * accelerator.num_processes * accumulation / BATCH)
                total += loss.item() / BATCH
                if accelerator.sync_gradients:
                    experts.training.sync.before_clip()
                    gradients.append(by_id(raw, lambda p: p.grad))
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.3))
                optimizer.step()
                optimizer.zero_grad()
        losses.append(torch.tensor(total, dtype=torch.float64))
    loss = torch.stack(losses)
    if dist.is_initialized():
        dist.all_reduce(loss)
    return {
        "losses": loss,
        "norms": torch.stack(norms).double(),
        "gradients": gradients,
        "weights": by_id(raw, lambda p: p.detach()),
        "moved": sum(m.report.cost.experts for m in experts.migrations),
    }


def shares(accumulation: int) -> list[Tensor]:
    """The rows of this rank's micro-batches: ragged, and empty for the last rank in the last of several."""
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    found = []
    for rows in torch.arange(BATCH).chunk(accumulation):
        cuts = [rows] if world == 1 else [rows[: len(rows) // 2], *rows[len(rows) // 2 :].tensor_split(world - 1)]
        found.append(cuts[rank])
    return found


def train_all(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [train(case) for case in cases]


HSDP = {"dense": "fsdp2", "fsdp_size": 2}
REPLICATING = ReplanOptions(planner="replicate", every=2, guarded=False)
MIGRATING = {"replan": ReplanOptions(planner="lpt", every=2, guarded=False)}
CASES: dict[int, list[dict[str, Any]]] = {
    2: [
        {"ep_size": 1},
        {"ep_size": 2, "placement": "copies", "spare_slots": 1},
        {"ep_size": 2, "placement": "shuffled", "dense": "fsdp2", "accumulation": 2, **MIGRATING},
        {"ep_size": 2, "placement": "one rank", "accumulation": 2},
        {"ep_size": 2, "replan": ReplanOptions(planner="swap", every=1)},
        {"ep_size": 2, "placement": "copies", "accumulation": 2, "skew": True, **MIGRATING},
        {"ep_size": 2, "placement": "uneven", "dense": "fsdp2"},
        {"ep_size": 2, "skew": True, "replan": REPLICATING, "spare_slots": 1},
        {"ep_size": 2, "dtype": torch.float32, "bf16": True, "placement": "copies"},
        {"ep_size": 2, "dtype": torch.float32, "bf16": True, "dense": "fsdp2"},
        {"ep_size": 2, "dtype": torch.float32, "placement": "shuffled", "dense": "fsdp2"},
    ],
    4: [
        {"ep_size": 2, "accumulation": 2, "placement": "copies", "spare_slots": 1},
        {"ep_size": 4, "placement": "three", "accumulation": 2},
        {"ep_size": 4, "placement": "copies", "dense": "fsdp2", "skew": True},
        {"ep_size": 2, "dense": "fsdp2", "placement": "shuffled", **MIGRATING},
        {"ep_size": 2, **HSDP, "placement": "shuffled", "accumulation": 2, **MIGRATING},
        {"groups": {"ep_size": 2, "ep_stride": 2}, **HSDP, "placement": "copies", "skew": True},
        {"ep_size": 4, "skew": True, "replan": REPLICATING.replace(every=1), "spare_slots": 1},
        {"ep_size": None, "dtype": torch.float32, **MIGRATING},
    ],
}
REFERENCES = [{}, {"skew": True}, {"dtype": torch.float32}, {"dtype": torch.float32, "bf16": True}]
BF16 = 0.05
"""In bf16 a product has 8 bits, about 0.4 %, and another split of the batch rounds otherwise. A token between
two experts may then go to either, so gradients of later steps are not compared; losses, norms and weights are."""


@pytest.fixture(scope="module")
def reference() -> list[dict[str, Any]]:
    ((*found,),) = run_distributed(train_all, 1, REFERENCES)
    return found


def together(ranks: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The rows of all ranks under plain names; replicas and copies must have the same bits."""
    found: dict[str, Tensor] = {}
    for rows in ranks:
        for name, row in rows.items():
            key = name.removesuffix(" copy")
            assert key not in found or torch.equal(found[key], row), f"{key} differs between ranks"
            found[key] = row
    return found


@pytest.mark.parametrize("world", CASES)
def test_loop_with_any_layout_equals_one_process(world: int, reference: list[dict[str, Any]]) -> None:
    for case, *ranks in zip(CASES[world], *run_distributed(train_all, world, CASES[world], timeout_s=300), strict=True):
        single = case.get("dtype") is torch.float32
        tolerance = BF16 if case.get("bf16") else 1e-5 if single else 1e-10
        expected = reference[3 if case.get("bf16") else 2 if single else 1 if case.get("skew") else 0]
        for rank in ranks:
            assert relative_difference(rank["losses"], expected["losses"]) < tolerance, case
            assert relative_difference(rank["norms"], expected["norms"]) < tolerance, case
        for step in range(1 if case.get("bf16") else STEPS):
            rows = [rank["gradients"][step] for rank in ranks]
            owners = [{k: v for k, v in each.items() if not k.endswith(" copy")} for each in rows]
            assert_equal_rows(together(owners), expected["gradients"][step], tolerance)
            assert not any(value.any() for each in rows for name, value in each.items() if name.endswith(" copy"))
        assert_equal_rows(together([rank["weights"] for rank in ranks]), expected["weights"], tolerance)
        if "replan" in case and not case["replan"].guarded:
            assert ranks[0]["moved"] > 0, f"nothing moved, so nothing was shown: {case}"


def metrics_beside_the_callback() -> tuple[Any, ...]:
    """What `metrics` returns before training, after every third step, and once more; and what `ExpertLoad` records."""
    accelerator = Accelerator(cpu=True)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    experts = ExpertParallel(accelerator, placement=place("uneven"))
    model, optimizer = experts.prepare(model, optimizer)
    load = ExpertLoad(accelerator.unwrap_model(model))
    recorded: dict[str, Any] = {}
    trainer: Any = SimpleNamespace(
        state=SimpleNamespace(step=0),
        max_steps=99,
        batches=SimpleNamespace(steps_per_epoch=99),
        record=recorded.__setitem__,
    )
    before, lines = experts.metrics(), []
    for step in range(1, 7):
        model(torch.randn(4 + step, 5)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        trainer.state.step, trainer.at_log_step = step, step % 3 == 0
        load.on_step_end(trainer)
        if trainer.at_log_step:
            numbers = {name: value for name, value in recorded.items() if not isinstance(value, list)}
            lines.append((experts.metrics(), numbers))
            recorded.clear()
    return before, lines, experts.metrics()


def output_dtypes() -> dict[str, torch.dtype]:
    found = {}
    for dense in ("ddp", "fsdp2"):
        AcceleratorState._reset_state()
        experts = ExpertParallel(Accelerator(cpu=True, mixed_precision="bf16"), dense=dense)  # type: ignore[arg-type]
        model = Model()
        prepared, _ = experts.prepare(model, torch.optim.SGD(model.parameters()))
        found[dense] = prepared(torch.randn(4, 5)).dtype
    return found


def test_outputs_under_mixed_precision_are_float32_with_ddp_and_fsdp2() -> None:
    for found in run_distributed(output_dtypes, 2):
        assert found == {"ddp": torch.float32, "fsdp2": torch.float32}


@pytest.mark.parametrize("world", [1, 2])
def test_metrics_equal_what_the_callback_records(world: int) -> None:
    ranks = run_distributed(metrics_beside_the_callback, world)
    assert ranks == [ranks[0]] * world
    before, lines, after = ranks[0]
    assert before == after == {}
    assert len(lines) == 2
    for read, recorded in lines:
        assert read == recorded
        assert ("moe/rank_imbalance" in read) == (world > 1)
    assert lines[0][0]["moe/max_load_over_mean"] != lines[1][0]["moe/max_load_over_mean"]


class UnequalLayers(nn.Module):
    """One module of experts in two places, then one with fewer experts, which may be skipped."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(5, DIM)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.blocks[1].experts = self.blocks[0].experts
        self.last = make_moe(DIM, 12, EXPERTS - 4, TOP_K)

    def forward(self, x: Tensor, skip: bool = False) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x if skip else x + self.last(x)


def metrics_of_unequal_layers() -> list[dict[str, float]]:
    """What `metrics` returns after steps with all layers, with some, and after more than are kept unread."""
    model: Any = UnequalLayers()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])
    experts = ExpertParallel(accelerator)
    model, optimizer = experts.prepare(model, optimizer)
    found = [experts.metrics()]
    with mock.patch("toolkit.experts.routing.load_meter.MOST_WAITING", 4):
        for skips in ([False], [True], [True, False, True] * 2):
            for skip in skips:
                model(torch.randn(8, 5), skip).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append(experts.metrics())
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_metrics_of_unequal_layers_are_finite(world: int) -> None:
    ranks = run_distributed(metrics_of_unequal_layers, world)
    assert ranks == [ranks[0]] * world
    none, *read = ranks[0]
    assert none == {}
    for each in read:
        assert all(math.isfinite(value) for value in each.values())
        assert each["moe/max_load_over_mean"] >= 1
        if world > 1:
            assert 1 <= each["moe/rank_imbalance"] <= world
            assert each["moe/rank_balancedness"] <= 1


def stopped_and_continued(folder: Path) -> tuple[Any, ...]:
    """Eight steps with a plan after every second, whole and in two parts; placements and weights at their ends."""

    def prepared() -> tuple[ExpertParallel, Any, Any]:
        model = Model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        accelerator = Accelerator(cpu=True)
        experts = ExpertParallel(accelerator, spare_slots=1, replan=REPLICATING.replace(every=3))
        return experts, *experts.prepare(model, optimizer)

    def steps(model: Any, optimizer: Any, first: int, last: int) -> None:
        for step in range(first, last):
            draws = torch.Generator().manual_seed(2 * step + dist.get_rank())
            model(torch.randn(8, 5, generator=draws)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    def end(experts: ExpertParallel, model: Any) -> tuple[Any, dict[str, Tensor]]:
        places = {name: stack.placement for name, stack in experts.stacks.items()}
        return places, by_id(model.module, lambda p: p.detach())

    experts, model, optimizer = prepared()
    start = {name: stack.placement for name, stack in experts.stacks.items()}
    steps(model, optimizer, 0, 5)
    experts.save(folder / "half")
    steps(model, optimizer, 5, 8)
    whole = end(experts, model)
    again, model, optimizer = prepared()
    again.load(folder / "half")
    steps(model, optimizer, 5, 8)
    return start, whole, end(again, model)


def test_resumed_loop_has_the_same_placement_and_weights_bitwise(tmp_path: Path) -> None:
    for start, (places, weights), (its_places, its_weights) in run_distributed(stopped_and_continued, 2, tmp_path):
        assert its_places == places != start
        assert its_weights.keys() == weights.keys()
        assert all(torch.equal(its_weights[name], weights[name]) for name in weights)


def frozen_after_a_backward() -> dict[str, Tensor]:
    """Weights after a step with gradients from before experts with replicas were frozen."""
    accelerator, model = Accelerator(cpu=True), Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    experts = ExpertParallel(accelerator, placement=place("copies"))
    wrapped, optimizer = experts.prepare(model, optimizer)
    wrapped(torch.randn(8, 5)).square().sum().backward()
    for parameter in experts.training.parameters:
        parameter.requires_grad_(False)
    optimizer.step()
    return by_id(model, lambda p: p.detach())


def test_experts_frozen_with_a_gradient_equal_their_replicas() -> None:
    together(run_distributed(frozen_after_a_backward, 2))


@pytest.mark.parametrize(
    ("name", "value"),
    [*(("distributed_type", value) for value in SHARD_THEMSELVES), ("parallelism_config", SimpleNamespace())],
)
def test_accelerator_that_shards_the_model_raises(name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(cpu=True)
    monkeypatch.setattr(Accelerator, name, value)
    with pytest.raises(UserError, match="accelerator: FSDP"):
        ExpertParallel(accelerator)


def test_prepare_returns_objects_in_their_order_and_one_object_bare() -> None:
    accelerator, model = Accelerator(cpu=True), Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader, its_optimizer, its_model = ExpertParallel(accelerator).prepare(
        DataLoader(TensorDataset(torch.randn(4, 5)), 2), optimizer, model
    )
    assert its_model is model
    assert its_optimizer.optimizer is optimizer
    assert [batch.shape for (batch,) in loader] == [(2, 5)] * 2
    other = Model()
    assert ExpertParallel(accelerator).prepare(other) is other


def prepared_before(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    Accelerator(cpu=True).prepare_model(model, evaluation_mode=True)
    return model, optimizer


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    model(torch.randn(4, 5)).sum().backward()
    optimizer.step()
    return model, optimizer


UNFIT: dict[str, tuple[Any, str]] = {
    "model was prepared before": (prepared_before, "was prepared by accelerator.prepare"),
    "optimizer was prepared before": (
        lambda m, o: (m, Accelerator(cpu=True).prepare(o)),
        "was prepared by accelerator",
    ),
    "optimizer has stepped": (stepped, "it has stepped"),
    "parameter outside the model": (
        lambda m, _: (m, torch.optim.SGD([*m.parameters(), nn.Parameter(torch.ones(()))])),
        "not in the model",
    ),
}


@pytest.mark.parametrize("case", UNFIT)
def test_prepare_of_unfit_objects_raises_before_anything_is_changed(case: str) -> None:
    change, words = UNFIT[case]
    model = Model()
    model, optimizer = change(model, torch.optim.AdamW(model.parameters()))
    before = dict(vars(model.blocks[0].experts))
    with pytest.raises(UserError, match=words):
        ExpertParallel(Accelerator(cpu=True)).prepare(model, optimizer)
    assert vars(model.blocks[0].experts).keys() == before.keys()


def refusals() -> list[str]:
    said = []

    def refuse(act: Any) -> None:
        with pytest.raises(UserError) as error:
            act()
        said.append(str(error.value))

    accelerator, model = Accelerator(cpu=True), Model()
    optimizer = torch.optim.AdamW(model.parameters())
    refuse(lambda: ExpertParallel(accelerator, ep_size=1, groups=make_expert_groups(1)))
    refuse(lambda: ExpertParallel(accelerator, ep_size=3).prepare(model, optimizer))
    refuse(lambda: ExpertParallel(accelerator, ep_size=1).prepare(Model(), torch.optim.SGD(Model().head.parameters())))
    experts = ExpertParallel(accelerator)
    refuse(lambda: experts.save("nowhere"))
    experts.prepare(model, optimizer)
    refuse(lambda: experts.prepare(Model()))
    refuse(lambda: accelerator.clip_grad_norm_(model.parameters(), 1.0, norm_type=1))
    return said


def test_unfit_settings_and_calls_raise() -> None:
    words = ["ep_size: 1 and groups", "ep_size=3", "not in the model", "save: it", "prepare: it", "norm_type: 1"]
    (said,) = run_distributed(refusals, 1)
    for sentence, word in zip(said, words, strict=True):
        assert word in sentence


def ids_raise(kind: str, chosen: int) -> str:
    model = Model()
    experts = ExpertParallel(Accelerator(cpu=True), placement=place(kind))
    experts.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(UserError) as said:
        model.blocks[0].experts(torch.randn(2, DIM), torch.tensor([[0, 1], [2, chosen]]), torch.ones(2, 2))
    return str(said.value)


@pytest.mark.parametrize(("world", "kind", "chosen"), [(1, "blocks", -1), (2, "shuffled", EXPERTS)])
def test_invalid_expert_ids_raise(world: int, kind: str, chosen: int) -> None:
    for said in run_distributed(ids_raise, world, kind, chosen):
        assert said.startswith(f"expert ids: {chosen} in a layer of {EXPERTS} experts")
