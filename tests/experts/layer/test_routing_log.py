"""One log per layer: what is counted in it, and what each kind of cursor reads."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.helpers import run_distributed
from toolkit.dynamic.routing_statistics import count_pairs
from toolkit.experts.layer.moe_layer import MoE, make_moe
from toolkit.experts.layer.recompute import checkpoint
from toolkit.experts.layer.routing_log import Cursor, take_parts
from toolkit.experts.parallel.groups import make_expert_groups

DIM, EXPERTS, TOP_K = 8, 4, 2


def layer_of(ep_size: int = 1, **options: Any) -> MoE:
    torch.manual_seed(0)
    return make_moe(DIM, 6, EXPERTS, TOP_K, groups=make_expert_groups(ep_size), **options)


def tokens(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, DIM, generator=torch.Generator().manual_seed(seed))


def chosen(layer: MoE, x_TD: Tensor) -> Tensor:
    """(T, E) int64: 1 where a token chooses an expert."""
    with torch.no_grad():
        return torch.nn.functional.one_hot(layer.router(x_TD).expert_ids_TK, EXPERTS).sum(1)


def test_each_cursor_reads_what_is_new_since_it_last_read() -> None:
    layer = layer_of()
    log = layer.expert_stack.log
    layer(tokens(9))
    often, seldom = log.cursor(), log.cursor()
    for seed in (1, 2):
        layer(tokens(5, seed))
        assert torch.equal(often.new_load_E(), chosen(layer, tokens(5, seed)).sum(0))
        often.advance()
    assert often.new_load_E().tolist() == [0] * EXPERTS
    assert int(seldom.new_load_E().sum()) == 2 * 5 * TOP_K
    assert int(log.load_E.sum()) == (9 + 5 + 5) * TOP_K


def test_only_training_forwards_are_counted_and_each_once() -> None:
    layer = layer_of()
    log = layer.expert_stack.log
    sums, forwards = log.cursor(), log.follow(choices=True)
    x_TD = tokens(7).requires_grad_()
    checkpoint(layer, x_TD).square().sum().backward()
    with torch.no_grad():
        layer(tokens(5))
        layer(tokens(3))
    assert int(sums.new_load_E().sum()) == 7 * TOP_K
    (forward,) = forwards.take()
    assert torch.equal(forward.load_E, sums.new_load_E())
    assert int(log.last_load_E.sum()) == 3 * TOP_K, "losses ask for the last forward, in evaluation too"


def test_dropped_assignments_are_part_of_the_load_and_counted_apart() -> None:
    layer = layer_of(capacity_factor=0.5)
    log = layer.expert_stack.log
    forwards = log.follow()
    layer(tokens(12))
    (forward,) = forwards.take()
    assert forward.dropped_E is not None
    assert int(forward.load_E.sum()) == 12 * TOP_K
    assert int((forward.load_E - forward.dropped_E).max()) == 3, "half of 24 assignments over 4 experts"
    assert torch.equal(log.dropped_E, forward.dropped_E)


def test_token_choices_are_kept_for_those_who_asked_only() -> None:
    layer = layer_of()
    log = layer.expert_stack.log
    plain, curious = log.follow(), log.follow(choices=True)
    layer(tokens(6))
    assert plain.take()[0].choices is None
    choices = curious.take()[0].choices
    assert choices is not None
    assert choices.expert_ids_TK.shape == (6, TOP_K)


def test_pairs_are_exact_under_autocast() -> None:
    layer = layer_of()
    forwards = layer.expert_stack.log.follow(choices=True)
    x_TD = tokens(1501)
    with torch.autocast("cpu", torch.bfloat16):
        layer(x_TD)
        got_EE = count_pairs([forward.choices for forward in forwards.take()], EXPERTS)
        chosen_TE = chosen(layer, x_TD)
    assert torch.equal(got_EE, chosen_TE.T @ chosen_TE)
    assert int(got_EE.max()) > 256, "bfloat16 cannot hold all whole numbers above"


def test_nothing_is_kept_for_a_cursor_that_is_gone() -> None:
    layer = layer_of()
    log = layer.expert_stack.log
    gone, here = log.follow(), log.follow()
    del gone
    gc.collect()
    for count in (5, 6, 7, 8):
        layer(tokens(count))
    assert list(log._followers) == [here]
    assert [int(forward.load_E.sum()) // TOP_K for forward in here.take()] == [5, 6, 7, 8]
    assert not here.take()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_a_copy_of_a_model_has_an_empty_log_of_its_own(duplicate: Any) -> None:
    layer = layer_of()
    log = layer.expert_stack.log
    cursor, forwards = log.cursor(), log.follow(choices=True)
    layer(tokens(4))
    with torch.no_grad():  # torch copies no module that holds tensors of a graph
        layer(tokens(3))
    twin = duplicate(layer)
    its_log = twin.expert_stack.log
    assert its_log is not log
    assert int(its_log.load_E.sum()) == 0
    twin(tokens(6))
    assert int(its_log.load_E.sum()) == 6 * TOP_K
    assert int(cursor.new_load_E().sum()) == 4 * TOP_K
    assert len(forwards) == 1
    layer(tokens(5))
    assert len(forwards) == 2
    assert int(its_log.load_E.sum()) == 6 * TOP_K


# torch.compile itself makes an instance of each autograd function that it traces, and asks tensors for their gradient.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated", "ignore:The .grad attribute of a Tensor")
@pytest.mark.usefixtures("unchecked_shapes")
def test_a_compiled_layer_is_compiled_once_however_many_forwards_wait() -> None:
    layer, compilations = layer_of(), []

    def backend(graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> Any:
        compilations.append(graph)
        return graph.forward

    forwards = layer.expert_stack.log.follow(choices=True)
    compiled = torch.compile(layer, backend=backend)
    after = []
    for _ in range(6):
        compiled(tokens(10))
        after.append(len(compilations))
    assert after[1] == after[-1]
    assert len(forwards) == 6
    torch.compiler.reset()


def read_on_ranks(state: dict[str, Any] | None, ep_size: int) -> tuple[dict[str, Any], list[list[int]]]:
    """A cursor's state with some forwards unread, what it says of sources, and loads read over two layers."""
    layer = layer_of(ep_size)
    cursor = layer.expert_stack.log.cursor()
    rank = dist.get_rank() if dist.is_initialized() else 0
    if state is None:
        layer(tokens(3, 9))
        cursor.advance()
        layer(tokens(4 + rank, 10 + rank))
        cursor.end_part()
        layer(tokens(2, 12))
    else:
        layer(tokens(5))  # before the state is loaded, so not to be read
        cursor.load_state_dict(state)
    other = Cursor(layer.expert_stack.log)
    unread = cursor.state_dict()
    return unread, [load_SE.tolist() for load_SE in take_parts([cursor, other])]


def test_what_is_unread_goes_into_the_state_and_comes_back_on_any_number_of_ranks() -> None:
    ranks = run_distributed(read_on_ranks, 2, None, 2)
    layer = layer_of()
    by_rank = [[chosen(layer, tokens(4 + rank, 10 + rank)), chosen(layer, tokens(2, 12))] for rank in range(2)]
    state, loads = ranks[0]
    assert ranks[1] == ranks[0]
    assert state["load"] == [[chosen_TE.sum(0).tolist() for chosen_TE in parts] for parts in by_rank]
    total = torch.tensor(state["load"]).sum(0).tolist()
    assert loads == [total, [[0] * EXPERTS]]
    assert run_distributed(read_on_ranks, 2, state, 2) == ranks
    assert read_on_ranks(state, 1) == ({"load": [total]}, loads)
