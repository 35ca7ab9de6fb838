"""Logged metrics, compared with metrics of a trace, with the bytes of all-to-alls, and with values by hand."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.support.processes import run_distributed
from tests.parity.layouts import place
from toolkit.data.batches import TrainBatches
from toolkit.data.table import TensorTable
from toolkit.experts.expert_records import ExpertRecords
from toolkit.experts.layer import dispatcher, rows
from toolkit.experts.layer.moe_layer import Experts, make_moe
from toolkit.experts.layer.recompute import checkpoint
from toolkit.experts.layer.routing_log import RowBytes
from toolkit.experts.layer.rows import Sizes
from toolkit.experts.layer.stack import crossings
from toolkit.experts.moving.replan_options import ReplanOptions
from toolkit.experts.parallel.groups import ExpertGroups, make_expert_groups
from toolkit.experts.placement.loads import rank_imbalance
from toolkit.experts.placement.placement import EMPTY_ROW, ExpertPlacement, contiguous
from toolkit.experts.placement.traffic import migration_cost
from toolkit.experts.routing.forwards import ModelForwards
from toolkit.experts.routing.metrics import Window, balance_metrics, count, expert_metrics, traffic_metrics
from toolkit.experts.routing.traces import read_trace
from toolkit.run.config.run import RunConfig
from toolkit.run.run import start_run
from toolkit.run.tracking.jsonl import read_metrics
from toolkit.train.callbacks.expert_load import ExpertLoad
from toolkit.train.callbacks.replan import Replan
from toolkit.train.callbacks.trace_recorder import TraceRecorder
from toolkit.train.optim import build_optimizer, warmup_cosine
from toolkit.train.tasks.classification import Classification
from toolkit.train.trainer import Trainer

DIM, EXPERTS, BATCH, STEPS, LOG_EVERY, PLAN_EVERY = 8, 8, 32, 9, 3, 4

CASES = [
    (2, 2, 1, 1, "uneven", "lpt", False),
    (2, 2, 1, 2, "spare", "replicate", True),
    (4, 2, 1, 2, "replicas", "replicate", False),
    (4, 2, 2, 1, "uneven", "lpt", False),
]
"""(world size, ep_size, ep_stride, accumulation, placement, planner, recompute)."""
HIERARCHICAL = len(CASES)
BYTES = ("all_to_all", "cross_node")


class TwoLayers(nn.Module):
    def __init__(self, groups: ExpertGroups, placement: ExpertPlacement, recompute: bool):
        super().__init__()
        layers = [make_moe(DIM, 4, EXPERTS, 2, groups=groups, placement=placement, seed=seed) for seed in (1, 2)]
        self.stem, self.head = nn.Linear(DIM, DIM), nn.Linear(DIM, 3)
        self.layers, self.recompute = nn.ModuleList(layers), recompute
        for layer in layers:  # makes some experts hot, so that plans differ
            layer.router.weight.data *= 40

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = x + (checkpoint(layer, x) if self.recompute else layer(x))
        return self.head(x)


class Meter:
    """Counts bytes sent to other ranks and nodes, and visits of tokens to other nodes, in a context."""

    def __init__(self, ranks_per_node: int) -> None:
        self.ranks_per_node, self.here = ranks_per_node, dist.get_rank() // ranks_per_node
        self.bytes = self.bytes_between_nodes = self.visits = 0
        self.begin, self.slots_of = rows._Flight.begin, dispatcher.AllToAllDispatcher.slots_of

    def counted_begin(self, flight: Any, sent: Tensor, sizes: Sizes) -> Any:
        size = sent.shape[1] * sent.element_size()
        self.bytes += (sum(sizes.sent) - sizes.sent[dist.get_rank(sizes.group)]) * size
        for peer, many in zip(dist.get_process_group_ranks(sizes.group), sizes.sent, strict=True):
            self.bytes_between_nodes += many * size * (peer // self.ranks_per_node != self.here)
        return self.begin(flight, sent, sizes)

    def counted_slots_of(self, found: Any, ids_TK: Tensor) -> Tensor:
        slots_TK = self.slots_of(found, ids_TK)
        ranks = dist.get_process_group_ranks(found.groups.ep_group)
        for slots in slots_TK.tolist():
            self.visits += len({ranks[slot // found.stride] // self.ranks_per_node for slot in slots} - {self.here})
        return slots_TK

    @contextmanager
    def counting(self) -> Iterator[None]:
        with (
            mock.patch.object(rows._Flight, "begin", lambda *args: self.counted_begin(*args)),
            mock.patch.object(dispatcher.AllToAllDispatcher, "slots_of", lambda *args: self.counted_slots_of(*args)),
        ):
            yield


def train(folder, ep_size, stride, accumulation, placement, planner, recompute, ranks_per_node=2, exchange="flat"):
    """Return bytes sent, results, visits of other nodes, and bytes sent to other nodes."""
    config = RunConfig(run_dir=folder, cpu=True, batch_size=BATCH, gradient_accumulation_steps=accumulation)
    meter = Meter(ranks_per_node)
    nodes = mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=str(ranks_per_node))
    with start_run("metered", config) as run, meter.counting(), nodes:
        groups = make_expert_groups(ep_size, ep_stride=stride, exchange=exchange)
        torch.manual_seed(0)
        model = TwoLayers(groups, place(placement, EXPERTS, ep_size), recompute)
        draws = torch.Generator().manual_seed(5)
        table = TensorTable(
            input=torch.randn(BATCH * STEPS, DIM, generator=draws),
            label=torch.randint(3, (BATCH * STEPS,), generator=draws),
        )
        where = {"rank": run.rank, "world_size": run.world_size}
        trainer = Trainer(
            run,
            Classification(),
            model,
            build_optimizer(model, config.replace(lr=0.02)),
            TrainBatches(table, batch_size=BATCH, seed=0, accumulation=accumulation, **where),
            max_steps=STEPS,
            schedule=warmup_cosine(max_steps=STEPS),
            log_every=LOG_EVERY,
            callbacks=[
                ExpertLoad(),
                TraceRecorder(Experts.of(model)),
                Replan(ReplanOptions(planner=planner, every=PLAN_EVERY, guarded=False)),
            ],
        )
        results = trainer.fit()
    return meter.bytes, results, meter.visits, meter.bytes_between_nodes


def run_cases(folder: Path) -> dict[int, Any]:
    """Run the cases of this world size, and one with the hierarchical exchange between two nodes."""
    world = dist.get_world_size()
    cases = [index for index, case in enumerate(CASES) if case[0] == world]
    found = {index: train(folder / str(index), *CASES[index][1:]) for index in cases}
    options: dict[str, Any] = {"ranks_per_node": world // 2, "exchange": "hierarchical"}
    last = train(folder / str(HIERARCHICAL), world, 1, 1, "replicas", "replicate", False, **options)
    return found | {HIERARCHICAL: last}


def logged_metrics(folder: Path) -> list[dict[str, Any]]:
    return [line for line in read_metrics(folder / "metrics.jsonl") if "moe/rank_imbalance" in line]


@pytest.fixture(scope="module", params=[2, 4])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, list[Any]]]:
    folder = tmp_path_factory.mktemp("metered")
    ranks = run_distributed(run_cases, request.param, folder)
    return folder, {index: [rank[index] for rank in ranks] for index in ranks[0]}


def test_logged_metrics_equal_metrics_of_the_trace(runs):
    folder, by_case = runs
    for index, ranks in list(by_case.items())[:-1]:
        world, ep_size, stride, accumulation, *_, recompute = CASES[index]
        # Ranks of the EP groups in order: {0, 2} and {1, 3} for a stride of 2.
        order = [0, 2, 1, 3] if stride == 2 else list(range(world))
        trace = read_trace(folder / str(index) / "traces.npz")
        forwards = STEPS * accumulation
        assert trace.load_FLSE.shape == (forwards, 2, world, EXPERTS)
        assert trace.load_FLSE.sum() == 2 * 2 * BATCH * STEPS
        assert trace.step_F.tolist() == [step for step in range(STEPS) for _ in range(accumulation)]
        changes = [*trace.placements[1:], (forwards, None)]
        assert len(trace.placements) > 1, "nothing migrated"
        counts = None
        migrated = np.zeros(2, dtype=np.int64)
        for (first, placements), (end, after) in zip(trace.placements, changes, strict=True):
            part = count(trace.load_FLSE[first:end], placements, sources=range(world), world_size=world)
            counts = part if counts is None else counts.then(part)
            for layer, (old, new) in enumerate(zip(placements, after or placements, strict=True)):
                sizes = {key: trace.metadata[key][layer] for key in ("weight_bytes", "optimizer_bytes")}
                cost = migration_cost(old, new, **sizes)
                migrated += [cost.experts, cost.bytes]
        assert trace.row_bytes == [RowBytes(4 * DIM + 2 * (4 + 2), 4 * DIM)] * 2
        # Three windows of three steps, across migrations.
        logged = logged_metrics(folder / str(index))
        assert [each["step"] for each in logged] == [3, 6, 9]
        window = Window.of(counts)
        for number, each in enumerate(logged):
            part = slice(number * LOG_EVERY * accumulation, (number + 1) * LOG_EVERY * accumulation)
            assert each["moe/rank_imbalance"] == window.imbalance_FL[part].mean(1).mean()
            assert each["moe/rank_imbalance_worst_layer"] == window.imbalance_FL[part].mean(0).max()
            for layer, rows_W in enumerate(counts.received_FLW[part].sum(0)):
                shares = [each[f"moe/rank_load/layers.{layer}"][rank] for rank in order]
                assert shares == (rows_W / rows_W.sum()).tolist()
        sums = traffic_metrics(window, trace.row_bytes, steps=1, node_of_rank=[r // 2 for r in order])
        if not recompute:
            sent = [round(sum(each[f"moe/{name}_bytes_per_step"] for each in logged) * LOG_EVERY) for name in BYTES]
            assert sent == [sum(sent for sent, *_ in ranks), sum(sent for *_, sent in ranks)]
        pairs_per_log_step = 2 * 2 * BATCH * LOG_EVERY
        deduplicated = [each["moe/cross_node_fraction_deduplicated"] for each in logged]
        visits = sum(visits for *_, visits, _ in ranks)
        assert sum(round(fraction * pairs_per_log_step) for fraction in deduplicated) == visits
        per_pair = [each["moe/cross_node_fraction"] for each in logged]
        assert sum(per_pair) == pytest.approx(sums["moe/cross_node_fraction"] * len(logged))
        if ep_size * stride > 2:
            assert all(0 < low < high for low, high in zip(deduplicated, per_pair, strict=True))
        else:
            assert deduplicated == per_pair == [0.0] * len(logged)
        results = ranks[0][1]
        assert sum(each["moe/migration_bytes"] for each in logged) == migrated[1]
        assert logged[-1]["moe/migration_bytes_per_step"] == migrated[1] / STEPS
        predicted = []
        for layer in range(2):
            # The last change of this layer's placement, planned by the load of the four steps before it.
            pairs = pairwise(trace.placements)
            first, new = [(at, to[layer]) for (_, of), (at, to) in pairs if of[layer] != to[layer]][-1]
            window_FSE = trace.load_FLSE[first - PLAN_EVERY * accumulation : first, layer]
            predicted.append(rank_imbalance(window_FSE.sum((0, 1)), new))
        assert logged[-1]["moe/predicted_imbalance"] == pytest.approx(np.mean(predicted))
        plans = range(PLAN_EVERY, STEPS + 1, PLAN_EVERY)
        steps = sorted({at // accumulation for (_, of), (at, to) in pairwise(trace.placements) if of != to})
        assert (results["first_move_step"], results["last_move_step"]) == (steps[0], steps[-1])
        windows = {
            step: trace.load_FLSE[(step - PLAN_EVERY) * accumulation : step * accumulation].sum((0, 2))
            for step in plans
        }
        placed = {at // accumulation: to for at, to in trace.placements}
        imbalance = {
            step: np.mean([*map(rank_imbalance, load_LE, placed[max(at for at in placed if at < step)])])
            for step, load_LE in windows.items()
        }
        since = [imbalance[step] for step in plans if step > steps[-1]]
        assert results["imbalance_before_moves"] == pytest.approx(imbalance[steps[0]])
        assert results["imbalance_after_moves"] == pytest.approx(np.mean(since or predicted))
        assert results["migrated_experts"] == migrated[0] > 0
        assert results["migration_bytes"] == migrated[1]


def test_logged_bytes_of_the_hierarchical_exchange_equal_bytes_sent(runs):
    folder, by_case = runs
    ranks = by_case[HIERARCHICAL]
    logged = logged_metrics(folder / str(HIERARCHICAL))
    assert sum(each["moe/migrated_experts"] for each in logged) > 0
    total, between = (round(sum(each[f"moe/{name}_bytes_per_step"] for each in logged) * LOG_EVERY) for name in BYTES)
    assert total == sum(sent for sent, *_ in ranks)
    # Per token and other node: a row in dispatch and combine, forward and backward; in dispatch also two weights,
    # forward and backward, and two slots.
    visit = 4 * DIM * 4 + 2 * 2 * 4 + 2 * 4
    assert between == sum(sent for *_, sent in ranks) == visit * sum(visits for *_, visits, _ in ranks) > 0
    assert total == between if len(ranks) == 2 else total > between
    assert all(each["moe/cross_node_fraction_deduplicated"] < each["moe/cross_node_fraction"] for each in logged)
    busiest = max(each["moe/all_to_all_bytes_per_step_busiest_rank"] for each in logged)
    assert total / STEPS / len(ranks) <= busiest <= total / LOG_EVERY


def test_metrics_of_a_window_by_hand():
    # Two forward passes, one layer, two ranks; experts 0 and 1 are on rank 0, expert 2 on rank 1.
    placement = ExpertPlacement(((0, 1), (2, EMPTY_ROW)))
    sent = np.array([[[[3, 0, 1], [0, 0, 4]]], [[[0, 2, 0], [2, 2, 2]]]])
    visits = np.array([[[3, 2], [3, 6]]])
    window = Window.of(count(sent, [placement], sources=range(2), world_size=2, visits_LSR=visits))
    assert window.imbalance_FL.tolist() == [[5 / 4], [6 / 4]]
    balance = balance_metrics(window, [placement])
    assert balance["moe/rank_imbalance"] == 1.375
    assert balance["moe/rank_balancedness"] == pytest.approx((4 / 5 + 4 / 6) / 2)
    # Loads 5, 4, 7: rank 0 has 9 of 16, the minimum of the busier rank.
    assert balance["moe/rank_imbalance_of_sum"] == 9 / 8
    # Ranks send 2 and 3 rows of 8 bytes and receive results of 16 bytes, and the same in the backward pass.
    bytes_ = traffic_metrics(window, [RowBytes(8, 16)], steps=2, node_of_rank=[0, 1])
    assert bytes_["moe/all_to_all_bytes_per_step"] == 2 * (5 * 8 + 5 * 16) / 2
    assert bytes_["moe/all_to_all_bytes_per_step_busiest_rank"] == 5 * 24 / 2
    assert bytes_["moe/local_bytes_per_step"] == 9 * 48 / 2
    # Of 16 pairs, rank 0 sends 1 and rank 1 sends 4.
    assert bytes_["moe/cross_node_fraction"] == 5 / 16
    assert traffic_metrics(window, [RowBytes(8, 16)], steps=2, node_of_rank=[0, 0])["moe/cross_node_fraction"] == 0
    experts = expert_metrics(window.load_LE)
    assert experts["moe/max_load_over_mean"] == pytest.approx(7 / 16 * 3)
    assert experts["moe/max_violation"] == pytest.approx(7 / 16 * 3 - 1)
    assert experts["moe/dead_experts"] == 0


@pytest.mark.parametrize("nodes", [[0, 0, 1, 1], [1, 0, 1, 0], [0, 1, 2, 3], [0, 0, 0, 0]])
def test_crossings_count_each_token_once_per_node(nodes):
    here = 2
    visits_TP = torch.rand(50, 4, generator=torch.Generator().manual_seed(1)) < 0.4
    visited = [{nodes[peer] for peer in row.nonzero().flatten().tolist()} - {nodes[here]} for row in visits_TP]
    crossed_M = crossings(visits_TP, torch.tensor(nodes), here)
    assert crossed_M.tolist() == [sum(node in row for row in visited) for node in range(4)]
    assert crossed_M.any() or len(set(nodes)) == 1


@pytest.mark.parametrize("capacity_factor", [None, 0.5])
def test_dropped_pairs_are_counted_separately_and_in_the_load(capacity_factor: float | None) -> None:
    layer = make_moe(4, 8, 3, 2, capacity_factor=capacity_factor)
    forwards, records = ModelForwards(Experts.of(layer)), ExpertRecords(Experts.of(layer))
    layer(torch.randn(10, 4))
    dropped_E = layer.expert_stack.log.last.dropped_E
    assert records.read(1).get("moe/dropped_fraction") == (None if dropped_E is None else int(dropped_E.sum()) / 20)
    if capacity_factor is None:
        return
    (found,) = forwards.take()
    assert found.dropped_FLE.sum() > 0
    assert (found.sent_FLE + found.dropped_FLE)[0, 0].tolist() == layer.load_E.tolist()
    assert found.dropped_FLE[0, 0].tolist() == dropped_E.tolist()
    sent_FLSE, dropped_LE = np.array([[[[1, 2]]]]), np.array([[3, 0]])
    counts = count(sent_FLSE, [contiguous(2, 1)], sources=[0], world_size=1, dropped_LE=dropped_LE)
    assert counts.load_LE.tolist() == [[4, 2]]
    assert counts.received_FLW.tolist() == [[[3]]]


def nodes_of_peers() -> list[int] | None:
    layer = make_moe(4, 4, 2, 1, groups=make_expert_groups(2))
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="3"):
        ExpertRecords(Experts.of(layer))
    nodes = layer.expert_stack.node_of_peer
    return None if nodes is None else nodes.tolist()


def test_expert_records_have_nodes_of_peers_for_groups_on_two_nodes_only() -> None:
    # Groups {0, 1} and {2, 3}; ranks 0 to 2 are on the first node.
    assert run_distributed(nodes_of_peers, 4) == [None, None, [0, 1], [0, 1]]
