"""The knowledge graph: the experts of a layer and their relations, as a networkx graph.

    graph = KnowledgeGraph()
    graph.observe_roster(roster, step=900)                      which experts are active, which was split from which
    graph.decay()                                               weights of edges that are not measured again fade
    graph.observe_routing(uids, together_EE, classes_EC)        load, specialization, co-activation
    graph.observe_similarity({(0, 3): 0.9})
    graph.affinity(roster.uids_of_logical), graph.often_coactivated(0, 3)

It uses no tensors, ranks or training state: ranks that observe the same have equal graphs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from toolkit.dynamic.plans import Pair
from toolkit.dynamic.roster import ExpertRoster

EdgeKind = Literal["similarity", "coactivation", "split", "merge"]
EDGE_DECAY, EDGE_FLOOR = 0.99, 0.1
"""Factor of the weights at each epoch and sleep phase, and floor below which measured edges are removed."""
LINEAGE = ("split", "merge")
"""Kinds of edges that record events: they fade to the floor and are never removed."""
OFTEN_TOGETHER = 0.5
"""Co-activation above which two experts are not merged: many tokens get the sum of both, which one cannot give."""
TOP_CLASSES = 3
UNSEEN: Mapping[str, Any] = {"rank": None, "share": 0.0, "classes": [], "top_classes": [], "specialisation": 0.0}
"""The measured attributes of a new expert."""


class KnowledgeGraph:
    """Nodes are experts by uid, removed ones too; edges have a kind and a weight.

    Nodes have `active`, `fate`, `logical_id`, `rank`, `created_at`, `removed_at`, `age` (steps), `parent` and
    `merged_into`, and of the last period `share` (of the layer's assignments), `classes` (fractions of the expert's
    tokens), `top_classes` and `specialisation`. Edges have a `kind` and a `weight` from 0 to 1:

    - similarity: see `observe_similarity`;
    - coactivation: t / sqrt(n m), where n and m tokens were routed to the experts, and t of them to both;
    - split, from parent to new expert, and merge, from the removed expert to the remaining one.

    `decay` multiplies weights by `EDGE_DECAY`. Below `EDGE_FLOOR` a measured edge is removed; split and merge edges
    stay at the floor.
    """

    def __init__(self) -> None:
        self.graph = nx.MultiDiGraph()

    # --- updates ----------------------------------------------------------------------------------------------

    def observe_roster(self, roster: ExpertRoster, *, step: int) -> None:
        """Updates nodes, split and merge edges to the roster at `step`."""
        for record in roster.records:
            unknown = {} if record.uid in self.graph else dict(UNSEEN)
            active = record.fate == "active"
            self.graph.add_node(
                record.uid,
                **unknown,
                active=active,
                fate=record.fate,
                logical_id=record.logical_id,
                created_at=record.created_at,
                removed_at=record.removed_at,
                age=(step if record.removed_at is None else record.removed_at) - record.created_at,
                parent=record.parent,
                merged_into=record.merged_into,
            )
            if not active:
                self.graph.nodes[record.uid]["rank"] = None
        for record in roster.records:
            if record.parent is not None and not self.graph.has_edge(record.parent, record.uid, "split"):
                self._link("split", record.parent, record.uid, 1.0)
            if record.merged_into is not None and not self.graph.has_edge(record.uid, record.merged_into, "merge"):
                self._link("merge", record.uid, record.merged_into, 1.0)

    def observe_routing(
        self,
        uids: Sequence[int],
        together_EE: NDArray[Any],
        classes_EC: NDArray[Any] | None = None,
        rank_of: Mapping[int, int] | None = None,
    ) -> None:
        """Updates the measured attributes and co-activations with a period's counts of experts `uids`.

        `together_EE[e, f]`: tokens routed to both; the diagonal holds the tokens routed to e. `classes_EC`: tokens of
        each class. Experts that are not in `uids` had no tokens; `uids` may hold experts removed since.
        """
        for node in self.graph.nodes.values():
            node["share"] = 0.0
        tokens_E = np.diagonal(together_EE).astype(float)
        total = tokens_E.sum()
        for e, uid in enumerate(uids):
            node = self.graph.nodes[uid]
            node["share"] = float(tokens_E[e] / total) if total else 0.0
            if classes_EC is not None and classes_EC[e].sum():
                node["classes"] = [round(float(f), 4) for f in classes_EC[e] / classes_EC[e].sum()]
                most = np.argsort(-classes_EC[e], kind="stable")[:TOP_CLASSES]
                node["top_classes"] = [int(c) for c in most if classes_EC[e, c] > 0]
                node["specialisation"] = specialisation(classes_EC[e], classes_EC.sum(0) > 0)
            for f in range(e + 1, len(uids)):
                both = float(together_EE[e, f])
                weight = both / math.sqrt(tokens_E[e] * tokens_E[f]) if both else 0.0
                self._measure("coactivation", uid, uids[f], weight, tokens=both)
        for uid, rank in (rank_of or {}).items():
            self.graph.nodes[uid]["rank"] = rank

    def observe_similarity(self, pairs: Mapping[Pair, float]) -> None:
        """Updates the similarity edges of the pairs that were compared.

        A similarity is the lower one of the cosine of aligned weights and one minus the normalised distance of outputs,
        as only experts similar in both are interchangeable.
        """
        for (a, b), similarity in pairs.items():
            self._measure("similarity", a, b, max(0.0, float(similarity)))

    def decay(self) -> None:
        """Lets the weights of edges that are not measured again fade; to be called once per epoch or sleep."""
        for a, b, kind, edge in list(self.graph.edges(keys=True, data=True)):
            edge["weight"] *= EDGE_DECAY
            if kind in LINEAGE:
                edge["weight"] = max(edge["weight"], EDGE_FLOOR)
            elif edge["weight"] < EDGE_FLOOR:
                self.graph.remove_edge(a, b, kind)
            elif kind == "coactivation":
                edge["tokens"] *= EDGE_DECAY

    def _measure(self, kind: EdgeKind, a: int, b: int, weight: float, **more: float) -> None:
        """Sets an undirected edge, stored from the lower uid to the higher, or removes it if `weight` is too low."""
        a, b = min(a, b), max(a, b)
        if weight >= EDGE_FLOOR:
            self._link(kind, a, b, weight, **more)
        elif self.graph.has_edge(a, b, kind):
            self.graph.remove_edge(a, b, kind)

    def _link(self, kind: EdgeKind, a: int, b: int, weight: float, **more: float) -> None:
        self.graph.add_edge(a, b, kind, kind=kind, weight=weight, **more)

    # --- queries ----------------------------------------------------------------------------------------------

    def weight(self, kind: EdgeKind, a: int, b: int) -> float:
        """Returns the weight of the edge of `kind` between two experts, from a to b for split and merge; 0 if there is
        none."""
        if kind not in LINEAGE:
            a, b = min(a, b), max(a, b)
        return self.graph.edges[a, b, kind]["weight"] if self.graph.has_edge(a, b, kind) else 0.0

    def often_coactivated(self, a: int, b: int) -> bool:
        """Returns whether so many tokens are routed to both experts that they should not be merged."""
        return self.weight("coactivation", a, b) > OFTEN_TOGETHER

    def affinity(self, uids_of_logical: Sequence[int | None]) -> NDArray[np.float64]:
        """Returns (E, E) by logical id, symmetric: tokens routed to both experts.

        Rows of inactive logical experts (uid None) and the diagonal are zero.
        """
        logical_id_of = {uid: logical_id for logical_id, uid in enumerate(uids_of_logical) if uid is not None}
        together_EE = np.zeros((len(uids_of_logical), len(uids_of_logical)))
        for a, b, kind, tokens in self.graph.edges(keys=True, data="tokens"):
            if kind == "coactivation" and a in logical_id_of and b in logical_id_of:
                e = logical_id_of[a]
                f = logical_id_of[b]
                together_EE[e, f] = together_EE[f, e] = tokens
        return together_EE

    # --- files and checkpoints --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns JSON values that `networkx.node_link_graph(..., edges="edges")` reads."""
        return nx.node_link_data(self.graph, edges="edges")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.graph = nx.node_link_graph(state, edges="edges")


def specialisation(counts_C: NDArray[Any], seen_C: NDArray[np.bool_] | None = None) -> float:
    """Returns 1 - H(p) / log C of an expert's tokens by class: 0 if classes are equally frequent, 1 if there is only
    one.

    One minus the evenness of Pielou 1966, doi 10.1016/0022-5193(66)90013-0. C counts the classes of `seen_C`, those
    that occurred in the period at all. 0 without tokens, or if only one class occurred.
    """
    counts = np.asarray(counts_C, dtype=float)
    classes = len(counts) if seen_C is None else int(np.count_nonzero(seen_C))
    if classes < 2 or not counts.sum():
        return 0.0
    p = counts[counts > 0] / counts.sum()
    return min(1.0, max(0.0, 1 + float((p * np.log(p)).sum()) / math.log(classes)))
