"""Means over samples and counts, for any batches and ranks."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.support.processes import run_distributed
from toolkit.train.metrics import MetricSums, global_counts

CPU = torch.device("cpu")


def sums_of(*parts: tuple[dict[str, Any], Any]) -> MetricSums:
    sums = MetricSums(CPU)
    for values, count in parts:
        sums.add({name: torch.tensor(value) for name, value in values.items()}, count)
    return sums


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([({"loss": 6.0}, 3), ({"loss": 1.0}, 1)], {"loss": 7 / 4}),
        ([({"loss": 0.0}, 0), ({"penalty": 1.0}, 2)], {"penalty": 0.5}),
        ([({"accuracy": 3}, torch.tensor(4)), ({"accuracy": 2}, torch.tensor(6))], {"accuracy": 0.5}),
        (
            [({"table": [[2, 0, 1], [0, 3, 0]], "loss": 3.0}, 6), ({"table": [[0, 0, 1], [1, 0, 0]], "loss": 1.0}, 2)],
            {"table": [[2 / 8, 0, 2 / 8], [1 / 8, 3 / 8, 0]], "loss": 0.5},
        ),
    ],
    ids=["samples weigh equally", "no samples", "integers and tensor counts", "tables"],
)
def test_means_equal_sums_over_counts(parts, expected):
    sums = sums_of(*parts)
    assert sums.compute() == sums.compute() == expected
    sums.reset()
    assert sums.compute() == {}


def test_add_detaches_and_does_not_change_its_argument():
    given = torch.ones((), requires_grad=True) * 2
    sums = MetricSums(CPU)
    sums.add({"loss": given}, 1)
    sums.add({"loss": given}, 1)
    assert given.item() == 2.0
    assert not any(total.requires_grad for total in sums._sums.values())


@pytest.mark.parametrize("kind", [int, torch.tensor])
def test_global_counts_of_one_process_are_at_least_one_in_total(kind):
    counts, total = global_counts([kind(3), kind(0)], CPU)
    assert (list(map(int, counts)), int(total)) == ([3, 0], 3)
    assert float(1 / total) == 1 / 3
    assert int(global_counts([kind(0), kind(0)], CPU)[1]) == 1


def counts_and_means() -> tuple[list[Any], list[dict[str, Any]]]:
    rank, counted = dist.get_rank(), []
    for kind in (int, torch.tensor):
        reduced, total = global_counts([kind(rank), kind(2 * rank), kind(0)], CPU)
        nothing = global_counts([kind(0)], CPU)[1]
        counted.append((torch.as_tensor(reduced).tolist(), float(total), float(nothing)))
    sums = sums_of(({"loss": float(rank)}, rank), ({"loss": 8.0}, 1), ({"pair": [rank, 1]}, 1))
    resumed = MetricSums(CPU)
    before = sums.compute()
    resumed.load_state_dict(sums.state_dict())
    return counted, [before, resumed.compute()]


def test_counts_and_means_cover_all_ranks_also_after_resume():
    for counted, means in run_distributed(counts_and_means, 3):
        assert counted == [([3, 6, 0], 9, 1)] * 2
        # Sums 0 + 1 + 2 and three times 8, over 0 + 1 + 2 and three samples.
        assert means == [{"loss": pytest.approx(27 / 6), "pair": [1.0, 1.0]}] * 2


def test_load_state_dict_adds_sums_of_all_ranks_on_fewer_ranks():
    state = [part for rank in range(3) for part in sums_of(({"loss": float(rank)}, rank + 1)).state_dict()]
    resumed = MetricSums(CPU)
    resumed.load_state_dict(state)
    assert resumed.compute() == {"loss": (0 + 1 + 2) / (1 + 2 + 3)}
