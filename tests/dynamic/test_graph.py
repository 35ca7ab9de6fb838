"""The knowledge graph: updates, decay and queries."""

import numpy as np
import pytest

from toolkit.dynamic.graph import KnowledgeGraph, specialisation
from toolkit.dynamic.roster import ExpertRoster

TOGETHER = np.array([[100, 60, 0], [60, 100, 20], [0, 20, 400]])
CLASSES = np.array([[100, 0], [50, 50], [100, 300]])


@pytest.fixture
def graph():
    graph = KnowledgeGraph()
    graph.observe_roster(ExpertRoster.initial(3, 3), step=10)
    graph.observe_routing((0, 1, 2), TOGETHER, CLASSES, {0: 0, 1: 0, 2: 1})
    return graph


def test_specialisation_equals_formula():
    assert specialisation(np.array([5, 5, 5, 5])) == 0.0
    assert specialisation(np.array([0, 9, 0, 0])) == 1.0
    # Half and half of four classes: H = log 2, so 1 - log 2 / log 4.
    assert specialisation(np.array([7, 7, 0, 0])) == pytest.approx(0.5)
    # If only these two classes occur, the expert has equal parts of all.
    assert specialisation(np.array([7, 7, 0, 0]), np.array([True, True, False, False])) == 0.0
    assert specialisation(np.zeros(4)) == specialisation(np.array([3])) == 0.0


def test_counts_become_shares_and_coactivation(graph):
    nodes = graph.graph.nodes
    assert [nodes[uid]["share"] for uid in range(3)] == pytest.approx([1 / 6, 1 / 6, 2 / 3])
    assert nodes[2]["classes"] == [0.25, 0.75]
    assert nodes[0]["top_classes"] == [0]
    assert nodes[0]["specialisation"] == 1.0
    assert [nodes[uid]["rank"] for uid in range(3)] == [0, 0, 1]
    # 60 / sqrt(100 * 100); 20 / sqrt(100 * 400) = 0.1 is just at the floor; no edge without common tokens.
    assert graph.weight("coactivation", 1, 0) == pytest.approx(0.6)
    assert graph.weight("coactivation", 1, 2) == pytest.approx(0.1)
    assert graph.weight("coactivation", 0, 2) == 0.0


def test_split_and_merge_edges_point_to_the_remaining_expert():
    roster = ExpertRoster.initial(2, 4).grow(2, step=20, parent=1).merge(0, into=2, step=30)
    graph = KnowledgeGraph()
    graph.observe_roster(roster, step=50)
    assert set(graph.graph.edges(keys=True)) == {(1, 2, "split"), (0, 2, "merge")}
    nodes = graph.graph.nodes
    assert [nodes[uid]["age"] for uid in range(3)] == [30, 50, 30]
    assert (nodes[0]["active"], nodes[0]["fate"], nodes[0]["rank"]) == (False, "merged", None)
    assert [nodes[uid]["active"] for uid in range(3)] == [False, True, True]


def test_measured_edges_decay_and_split_edges_stay():
    graph = KnowledgeGraph()
    graph.observe_roster(ExpertRoster.initial(2, 3).grow(2, step=1, parent=0), step=1)
    graph.observe_similarity({(0, 1): 0.4})
    assert graph.weight("similarity", 0, 1) == 0.4
    graph.decay()
    assert graph.weight("similarity", 1, 0) == 0.99 * 0.4
    for _ in range(300):
        graph.decay()
    assert graph.weight("similarity", 0, 1) == 0.0
    assert graph.weight("split", 0, 2) == 0.1


def test_queries_go_by_common_tokens(graph):
    assert graph.often_coactivated(1, 0)
    assert not graph.often_coactivated(1, 2)
    assert not graph.often_coactivated(0, 2)
    together = graph.affinity((1, None, 2, 0))
    assert together.tolist() == [[0, 0, 20, 60], [0, 0, 0, 0], [20, 0, 0, 0], [60, 0, 0, 0]]
