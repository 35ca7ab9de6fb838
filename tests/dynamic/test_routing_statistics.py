"""Counts of classes and pairs per expert: by hand, by uid, on one rank and on two."""

from __future__ import annotations

import torch
import torch.distributed as dist

import toolkit as tk
from tests.support.helpers import run_distributed
from toolkit.dynamic import routing_statistics as statistics
from toolkit.dynamic.routing_statistics import RoutingCounts, RoutingStatistics
from toolkit.experts.layer.moe_layer import moe_layers
from toolkit.experts.parallel.groups import make_expert_groups

DIM, EXPERTS, CLASSES = 6, 4, 3


def model(ep_size: int = 1) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(tk.experts.make_moe(DIM, 5, EXPERTS, 2, groups=make_expert_groups(ep_size)))


def counting(net: torch.nn.Module, ids=(0, 1, 2, 3)) -> RoutingStatistics:
    return RoutingStatistics(net, num_classes=CLASSES, uids_of_logical=lambda layer: ids)  # noqa: ARG005


def batch(tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    draws = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, DIM, generator=draws), torch.randint(CLASSES, (tokens,), generator=draws)


def by_hand(choices: list[list[int]], labels: list[int]) -> RoutingCounts:
    none = RoutingCounts.none(CLASSES)
    together = [[0] * EXPERTS for _ in range(EXPERTS)]
    classes = [[0] * CLASSES for _ in range(EXPERTS)]
    for chosen, label in zip(choices, labels, strict=True):
        for e in chosen:
            classes[e][label] += 1
            for f in chosen:
                together[e][f] += 1
    values = {"ids": list(range(EXPERTS)), "together": together, "classes": classes}
    return none + RoutingCounts.from_dict(values, CLASSES)


def test_a_step_is_counted_as_by_hand():
    net = model()
    count = counting(net)
    x, labels = batch(20, 1)
    count.begin_step([labels])
    net(x)
    choices = next(iter(moe_layers(net).values())).routing.expert_ids_TK.tolist()
    assert count.take()["0"].to_dict() == by_hand(choices, labels.tolist()).to_dict()
    assert count.take()["0"].ids == ()


def test_only_training_forwards_of_a_step_are_counted():
    net = model()
    count = counting(net)
    x, labels = batch(20, 1)
    net(x)
    count.begin_step([labels])
    with torch.no_grad():
        net(x)
    net(x)
    net(x)  # there is one micro-batch
    count.end_step()
    net(x)
    assert count.take()["0"].together_EE.trace() == 20 * 2


def test_counts_follow_uids_when_a_logical_expert_gets_another():
    net, uids = model(), [(0, 1, 2, 3)]
    count = RoutingStatistics(net, num_classes=CLASSES, uids_of_logical=lambda layer: uids[-1])  # noqa: ARG005
    x, labels = batch(20, 1)
    for ids in ((0, 1, 2, 3), (0, 1, 9, 3)):
        uids.append(ids)
        count.begin_step([labels])
        net(x)
    counts = count.take()["0"]
    tokens = dict(zip(counts.ids, counts.together_EE.diagonal().tolist(), strict=True))
    assert list(tokens) == [0, 1, 2, 3, 9]
    assert tokens[9] == tokens[2] > 0
    assert counts.together_EE[2, 4] == 0


def test_tokens_of_a_sequence_share_its_class_and_no_class_is_no_column():
    net = model()
    count = counting(net)
    x, _ = batch(12, 1)
    count.begin_step([torch.tensor([0, 2, 2]), None])
    net(x.view(3, 4, DIM))
    net(x)
    counts = count.take()["0"]
    assert counts.classes_EC.sum(0).tolist() == [4 * 2, 0, 8 * 2]
    assert counts.together_EE.trace() == 2 * 12 * 2


def test_many_forwards_are_added_up_and_their_state_continues(monkeypatch):
    whole, net = {}, model()
    for most in (1000, 30):
        monkeypatch.setattr(statistics, "MOST_ASSIGNMENTS", most)
        count = counting(net)
        for seed in range(8):
            if seed == 5 and most == 30:
                state = count.state_dict()
                count = counting(net)
                count.load_state_dict(state)
            x, labels = batch(7, seed)
            count.begin_step([labels])
            net(x)
        whole[most] = count.take()["0"].to_dict()
    assert whole[30] == whole[1000]


def share_of_rank() -> dict:
    net = model(ep_size=dist.get_world_size())
    count = counting(net)
    for seed, tokens in ((1, 20), (2, 1)):  # rank 1 gets nothing of the second
        x, labels = batch(tokens, seed)
        mine = slice(*((0, tokens - tokens // 2), (tokens - tokens // 2, tokens))[dist.get_rank()])
        count.begin_step([labels[mine]])
        net(x[mine])
    return count.take()["0"].to_dict()


def test_two_ranks_count_what_one_counts():
    net = model()
    count = counting(net)
    for seed, tokens in ((1, 20), (2, 1)):
        x, labels = batch(tokens, seed)
        count.begin_step([labels])
        net(x)
    alone = count.take()["0"].to_dict()
    assert run_distributed(share_of_rank, 2) == [alone, alone]
