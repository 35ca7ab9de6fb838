"""Sums and counts: means over samples, whatever the batches and ranks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.helpers import run_distributed
from toolkit.train.metrics import MetricSums, global_counts

CPU = torch.device("cpu")


def test_a_mean_weighs_each_sample_alike():
    sums = MetricSums(CPU)
    sums.add({"loss": torch.tensor(6.0)}, 3)
    sums.add({"loss": torch.tensor(1.0)}, 1)
    assert sums.compute() == {"loss": 7 / 4}


def test_reading_leaves_the_sums_and_reset_clears_them():
    sums = MetricSums(CPU)
    sums.add({"loss": torch.tensor(2.0)}, 1)
    assert sums.compute() == sums.compute() == {"loss": 2.0}
    sums.reset()
    assert sums.compute() == {}


def test_a_mean_of_no_samples_is_left_out():
    sums = MetricSums(CPU)
    sums.add({"loss": torch.tensor(0.0)}, 0)
    sums.add({"penalty": torch.tensor(1.0)}, 2)
    assert sums.compute() == {"penalty": 0.5}


@pytest.mark.parametrize("kind", [int, torch.tensor])
def test_counts_divide_and_a_step_where_nothing_counts_is_divided_by_one(kind: Callable[[int], Any]):
    counts, total = global_counts([kind(3), kind(0)], CPU)
    assert (list(map(int, counts)), int(total)) == ([3, 0], 3)
    assert float(1 / total) == 1 / 3
    assert int(global_counts([kind(0), kind(0)], CPU)[1]) == 1


def counted_over_ranks(as_tensors: bool) -> tuple[list[float], float, float]:
    rank = dist.get_rank()
    counts = [rank, 2 * rank, 0]
    reduced, total = global_counts([torch.tensor(each) for each in counts] if as_tensors else counts, CPU)
    _, nothing = global_counts([torch.tensor(0)] if as_tensors else [0], CPU)
    return torch.as_tensor(reduced).tolist(), float(total), float(nothing)


@pytest.mark.parametrize("as_tensors", [False, True])
def test_counts_add_up_over_ranks(as_tensors: bool):
    assert run_distributed(counted_over_ranks, 2, as_tensors) == [([1, 2, 0], 3, 1)] * 2


def test_adding_keeps_no_graph_and_leaves_the_given_tensor_alone():
    sums, value = MetricSums(CPU), torch.ones((), requires_grad=True)
    given = value * 2
    sums.add({"loss": given}, 1)
    sums.add({"loss": given}, 1)
    assert given.item() == 2.0
    assert not any(total.requires_grad for total in sums._sums.values())


def test_counts_may_be_tensors_and_sums_may_be_integers():
    sums = MetricSums(CPU)
    sums.add({"accuracy": torch.tensor(3)}, torch.tensor(4))
    sums.add({"accuracy": torch.tensor(2)}, torch.tensor(6))
    assert sums.compute() == {"accuracy": 0.5}


def test_a_table_of_counts_keeps_its_shape():
    sums = MetricSums(CPU)
    sums.add({"confusion": torch.tensor([[2, 0, 1], [0, 3, 0]]), "loss": torch.tensor(3.0)}, 6)
    sums.add({"confusion": torch.tensor([[0, 0, 1], [1, 0, 0]]), "loss": torch.tensor(1.0)}, 2)
    assert sums.compute() == {"confusion": [[2 / 8, 0, 2 / 8], [1 / 8, 3 / 8, 0]], "loss": 0.5}


def mean_over_ranks() -> tuple[dict[str, float], dict[str, float]]:
    rank, sums = dist.get_rank(), MetricSums(CPU)
    sums.add({"loss": torch.tensor(float(rank))}, rank)  # rank r: r samples, sum r
    sums.add({"loss": torch.tensor(8.0)}, 1)
    sums.add({"pair": torch.tensor([rank, 1])}, 1)
    before = sums.compute()
    state = sums.state_dict()
    resumed = MetricSums(CPU)
    resumed.load_state_dict(state)
    return before, resumed.compute()


def test_means_cover_all_ranks_and_survive_a_checkpoint_without_counting_twice():
    for before, resumed in run_distributed(mean_over_ranks, 3):
        # Sums 0 + 1 + 2 and three times 8, over 0 + 1 + 2 and three samples.
        assert before == resumed == {"loss": pytest.approx(27 / 6), "pair": [1.0, 1.0]}


def test_sums_of_all_ranks_are_loaded_on_fewer_ranks():
    of_ranks = []
    for rank in range(3):
        sums = MetricSums(CPU)
        sums.add({"loss": torch.tensor(float(rank))}, rank + 1)
        of_ranks += sums.state_dict()
    resumed = MetricSums(CPU)
    resumed.load_state_dict(of_ranks)
    assert resumed.compute() == {"loss": (0 + 1 + 2) / (1 + 2 + 3)}
