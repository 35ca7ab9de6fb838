"""Counts of classes and pairs per expert."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

import toolkit as tk
from toolkit.dynamic import routing_statistics
from toolkit.dynamic.routing_statistics import RoutingCounts, RoutingStatistics
from toolkit.experts.layer.moe_layer import moe_layers
from toolkit.experts.parallel.groups import make_expert_groups

DIM, EXPERTS, CLASSES = 6, 4, 3


def counted_layer(
    ep_size: int = 1, uids: Callable[[Any], Sequence[int]] = lambda _: range(EXPERTS)
) -> tuple[torch.nn.Module, RoutingStatistics]:
    torch.manual_seed(0)
    net = torch.nn.Sequential(tk.experts.make_moe(DIM, 5, EXPERTS, 2, groups=make_expert_groups(ep_size)))
    return net, RoutingStatistics(net, num_classes=CLASSES, uids_of_logical=uids)


def batch(tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    draws = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, DIM, generator=draws), torch.randint(CLASSES, (tokens,), generator=draws)


def reference_counts(choices: list[list[int]], labels: list[int]) -> RoutingCounts:
    together = [[0] * EXPERTS for _ in range(EXPERTS)]
    classes = [[0] * CLASSES for _ in range(EXPERTS)]
    for chosen, label in zip(choices, labels, strict=True):
        for e in chosen:
            classes[e][label] += 1
            for f in chosen:
                together[e][f] += 1
    values = {"ids": list(range(EXPERTS)), "together": together, "classes": classes}
    return RoutingCounts.none(CLASSES) + RoutingCounts.from_dict(values, CLASSES)


def test_counts_of_a_step_equal_a_loop_over_tokens():
    net, count = counted_layer()
    x, labels = batch(20, 1)
    count.begin_step([labels])
    net(x)
    choices = next(iter(moe_layers(net).values())).routing.expert_ids_TK.tolist()
    assert count.take()["0"].to_dict() == reference_counts(choices, labels.tolist()).to_dict()
    assert count.take()["0"].ids == ()


def test_only_training_forward_passes_of_a_step_are_counted():
    net, count = counted_layer()
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


def test_counts_follow_uids_when_a_logical_id_is_reused():
    uids = [(0, 1, 2, 3)]
    net, count = counted_layer(uids=lambda _: uids[-1])
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


def test_tokens_of_a_sequence_share_its_class_and_may_have_none():
    net, count = counted_layer()
    x, _ = batch(12, 1)
    count.begin_step([torch.tensor([0, 2, 2]), None])
    net(x.view(3, 4, DIM))
    net(x)
    counts = count.take()["0"]
    assert counts.classes_EC.sum(0).tolist() == [4 * 2, 0, 8 * 2]
    assert counts.together_EE.trace() == 2 * 12 * 2


def test_counts_do_not_depend_on_buffer_size_and_continue_from_state(monkeypatch):
    totals = {}
    for most in (1000, 30):
        monkeypatch.setattr(routing_statistics, "MOST_ASSIGNMENTS", most)
        net, count = counted_layer()
        for seed in range(8):
            if seed == 5 and most == 30:
                state = count.state_dict()
                net, count = counted_layer()
                count.load_state_dict(state)
            x, labels = batch(7, seed)
            count.begin_step([labels])
            net(x)
        totals[most] = count.take()["0"].to_dict()
    assert totals[30] == totals[1000]
