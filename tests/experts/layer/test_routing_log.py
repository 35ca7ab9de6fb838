"""Routing logs of layers, and their cursors over sums and over forward passes."""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.support.processes import run_distributed
from tests.experts.models import make_layer
from toolkit.dynamic.routing_statistics import count_pairs
from toolkit.experts.layer.moe_layer import MoE
from toolkit.experts.layer.recompute import checkpoint
from toolkit.experts.layer.routing_log import Cursor, take_parts
from toolkit.experts.parallel.collectives import rank

DIM, EXPERTS, TOP_K = 8, 4, 2
SIZES = (DIM, 6, EXPERTS, TOP_K)


def tokens(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, DIM, generator=torch.Generator().manual_seed(seed))


def chosen(layer: MoE, x_TD: Tensor) -> Tensor:
    """Return (T, E) int64: 1 if a token chooses an expert."""
    with torch.no_grad():
        return torch.nn.functional.one_hot(layer.router(x_TD).expert_ids_TK, EXPERTS).sum(1)


def test_cursor_reads_the_load_since_its_last_advance() -> None:
    layer = make_layer(*SIZES)
    log = layer.expert_stack.log
    layer(tokens(9))
    frequent, rare = log.cursor(), log.cursor()
    for seed in (1, 2):
        layer(tokens(5, seed))
        assert torch.equal(frequent.new_load_E(), chosen(layer, tokens(5, seed)).sum(0))
        frequent.advance()
    assert frequent.new_load_E().tolist() == [0] * EXPERTS
    assert int(rare.new_load_E().sum()) == 2 * 5 * TOP_K
    assert int(log.load_E.sum()) == (9 + 5 + 5) * TOP_K


def test_log_counts_each_training_forward_pass_once_and_keeps_choices_on_request() -> None:
    layer = make_layer(*SIZES)
    log = layer.expert_stack.log
    sums, plain, forwards = log.cursor(), log.follow(), log.follow(choices=True)
    x_TD = tokens(7).requires_grad_()
    checkpoint(layer, x_TD).square().sum().backward()
    with torch.no_grad():
        layer(tokens(5))
        layer(tokens(3))
    assert int(sums.new_load_E().sum()) == 7 * TOP_K
    (forward,) = forwards.take()
    assert torch.equal(forward.load_E, sums.new_load_E())
    assert forward.choices.expert_ids_TK.shape == (7, TOP_K)
    assert plain.take()[0].choices is None
    assert int(log.last_load_E.sum()) == 3 * TOP_K, "losses use the last forward pass, in evaluation too"


def test_count_pairs_is_exact_under_autocast() -> None:
    layer = make_layer(*SIZES)
    forwards = layer.expert_stack.log.follow(choices=True)
    x_TD = tokens(1501)
    with torch.autocast("cpu", torch.bfloat16):
        layer(x_TD)
        pairs_EE = count_pairs([forward.choices for forward in forwards.take()], EXPERTS)
        chosen_TE = chosen(layer, x_TD)
    assert torch.equal(pairs_EE, chosen_TE.T @ chosen_TE)
    assert int(pairs_EE.max()) > 256, "bfloat16 cannot represent all larger integers"


def test_log_drops_deleted_followers() -> None:
    layer = make_layer(*SIZES)
    log = layer.expert_stack.log
    deleted, kept = log.follow(), log.follow()
    del deleted
    gc.collect()
    for count in (5, 6, 7, 8):
        layer(tokens(count))
    assert list(log._followers) == [kept]
    assert [int(forward.load_E.sum()) // TOP_K for forward in kept.take()] == [5, 6, 7, 8]
    assert not kept.take()


# torch.compile instantiates each autograd function that it traces, and reads gradients of tensors.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated", "ignore:The .grad attribute of a Tensor")
@pytest.mark.usefixtures("unchecked_shapes")
def test_compiled_layer_with_unread_forward_passes_is_compiled_once() -> None:
    layer, compilations = make_layer(*SIZES), []

    def backend(graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> Any:
        compilations.append(graph)
        return graph.forward

    forwards = layer.expert_stack.log.follow(choices=True)
    compiled = torch.compile(layer, backend=backend)
    counts = []
    for _ in range(4):
        compiled(tokens(10))
        counts.append(len(compilations))
    assert counts[1] == counts[-1]
    assert len(forwards) == 4
    torch.compiler.reset()


def read(state: dict[str, Any] | None) -> tuple[dict[str, Any], list[list[int]]]:
    """Return a cursor's state with unread forward passes, or after loading `state`, and the loads of its parts."""
    layer = make_layer(*SIZES)
    cursor = layer.expert_stack.log.cursor()
    if state is None:
        layer(tokens(3, 9))
        cursor.advance()
        layer(tokens(4 + rank(), 10 + rank()))
        cursor.end_part()
        layer(tokens(2, 12))
    else:
        layer(tokens(5))  # before the state is loaded, so it counts as read
        cursor.load_state_dict(state)
    other = Cursor(layer.expert_stack.log)
    unread = cursor.state_dict()
    return unread, [load_SE.tolist() for load_SE in take_parts([cursor, other])]


def test_cursor_state_restores_unread_loads_for_any_world_size() -> None:
    ranks = run_distributed(read, 2, None)
    layer = make_layer(*SIZES)
    by_rank = [[chosen(layer, tokens(4 + rank, 10 + rank)), chosen(layer, tokens(2, 12))] for rank in range(2)]
    state, loads = ranks[0]
    assert ranks[1] == ranks[0]
    assert state["load"] == [[chosen_TE.sum(0).tolist() for chosen_TE in parts] for parts in by_rank]
    total = torch.tensor(state["load"]).sum(0).tolist()
    assert loads == [total, [[0] * EXPERTS]]
    assert run_distributed(read, 2, state) == ranks
    assert read(state) == ({"load": [total]}, loads)
