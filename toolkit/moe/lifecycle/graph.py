"""What is known of a layer's experts and of how they relate: a networkx graph that pictures and planners ask.

    graph = KnowledgeGraph()
    graph.observe_roster(population, step=900)          who lives, who came from whom
    graph.decay()                                           what is not measured again fades
    graph.observe_routing(ids, together_EE, classes_EC)     traffic, specialisation, who fires with whom
    graph.observe_similarity({(0, 3): Similarity(weights=0.9, outputs=0.97)})
    graph.merge_candidates(0.9), graph.affinity(ids), graph.neighbours(3)

Nothing here knows of tensors, ranks or training: every rank that observes the same has the same graph.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from toolkit.moe.lifecycle.roster import ExpertRoster

EdgeKind = Literal["similarity", "coactivation", "split", "merge"]
LINEAGE = ("split", "merge")
"""What happened once stays true: these fade to the floor and not beyond."""
MOST_TOGETHER = 0.5
"""The co-activation above which two experts are a mean of two opinions, which one expert cannot give."""
TOP_CLASSES = 3
UNSEEN: Mapping[str, Any] = {"rank": None, "share": 0.0, "classes": [], "top_classes": [], "specialisation": 0.0}
"""What is known of a newborn."""


class Similarity(NamedTuple):
    """How alike two experts are, each from 0 to 1."""

    weights: float
    """After their hidden units were aligned."""
    outputs: float
    """On the same inputs."""


class Neighbour(NamedTuple):
    id: int
    kind: str
    weight: float


class KnowledgeGraph:
    """Experts as nodes under their ids, gone ones too; typed, weighted edges between them.

    Nodes have `active`, `fate`, `logical_id`, `rank`, `created_at`, `removed_at`, `age` (steps), `parent`, `merged_into`, and of the last period
    `share` (of routed copies), `classes` (fractions of what it saw), `top_classes` and `specialisation`. Edges have a
    `kind` and a `weight` from 0 to 1:

    - similarity: the lower one of the two that `Similarity` names, since only experts alike in both are the same;
    - coactivation: of two experts that saw n and m tokens and t of them both, t / sqrt(n m);
    - split, from parent to child, and merge, from who ended to the heir.

    `decay` multiplies weights by `edge_decay`; a measured edge below `edge_floor` is forgotten, a lineage stays there.
    """

    def __init__(self, *, edge_decay: float = 0.99, edge_floor: float = 0.1):
        if not (0 < edge_decay <= 1 and 0 <= edge_floor < 1):
            raise ValueError(f"edge_decay={edge_decay} must lie in (0, 1] and edge_floor={edge_floor} in [0, 1)")
        self.edge_decay, self.edge_floor = edge_decay, edge_floor
        self.graph = nx.MultiDiGraph()

    # --- what is observed -------------------------------------------------------------------------------------

    def observe_roster(self, roster: ExpertRoster, *, step: int) -> None:
        """Take up births, ends and ages as of `step`."""
        for record in roster.records:
            unknown = {} if record.id in self.graph else dict(UNSEEN)
            active = record.fate == "active"
            self.graph.add_node(
                record.id,
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
                self.graph.nodes[record.id]["rank"] = None
        for record in roster.records:
            if record.parent is not None and not self.graph.has_edge(record.parent, record.id, "split"):
                self._link("split", record.parent, record.id, 1.0)
            if record.merged_into is not None and not self.graph.has_edge(record.id, record.merged_into, "merge"):
                self._link("merge", record.id, record.merged_into, 1.0)

    def observe_routing(
        self,
        ids: Sequence[int],
        together_EE: NDArray[Any],
        classes_EC: NDArray[Any] | None = None,
        rank_of: Mapping[int, int] | None = None,
    ) -> None:
        """Take up a period's counts, by expert id.

        `together_EE[e, f]`: tokens that chose both; the diagonal holds the tokens that chose e. `classes_EC`: of which
        class. Who is not among `ids` saw nothing; who has ended since may be.
        """
        for node in self.graph.nodes.values():
            node["share"] = 0.0
        tokens_E = np.diagonal(together_EE).astype(float)
        total = tokens_E.sum()
        for e, id in enumerate(ids):
            node = self.graph.nodes[id]
            node["share"] = float(tokens_E[e] / total) if total else 0.0
            if classes_EC is not None and classes_EC[e].sum():
                node["classes"] = [round(float(f), 4) for f in classes_EC[e] / classes_EC[e].sum()]
                node["top_classes"] = top_classes(classes_EC[e])
                node["specialisation"] = specialisation(classes_EC[e], classes_EC.sum(0) > 0)
            for f in range(e + 1, len(ids)):
                both = float(together_EE[e, f])
                weight = both / math.sqrt(tokens_E[e] * tokens_E[f]) if both else 0.0
                self._measure("coactivation", id, ids[f], weight, tokens=both)
        for id, rank in (rank_of or {}).items():
            self.graph.nodes[id]["rank"] = rank

    def observe_similarity(self, pairs: Mapping[tuple[int, int], Similarity]) -> None:
        """Take up how alike pairs of experts were found to be."""
        for (a, b), alike in pairs.items():
            weight = max(0.0, min(alike))
            self._measure("similarity", a, b, weight, weights=float(alike.weights), outputs=float(alike.outputs))

    def decay(self) -> None:
        """Let an epoch, or a sleep, pass: what is not observed again counts for less."""
        for a, b, kind, edge in list(self.graph.edges(keys=True, data=True)):
            edge["weight"] *= self.edge_decay
            if kind in LINEAGE:
                edge["weight"] = max(edge["weight"], self.edge_floor)
            elif edge["weight"] < self.edge_floor:
                self.graph.remove_edge(a, b, kind)
            elif kind == "coactivation":
                edge["tokens"] *= self.edge_decay

    def _measure(self, kind: EdgeKind, a: int, b: int, weight: float, **more: float) -> None:
        """Set an edge without direction, which goes from the lower id to the higher, or forget a weak one."""
        a, b = min(a, b), max(a, b)
        if weight >= max(self.edge_floor, 1e-9):
            self._link(kind, a, b, weight, **more)
        elif self.graph.has_edge(a, b, kind):
            self.graph.remove_edge(a, b, kind)

    def _link(self, kind: EdgeKind, a: int, b: int, weight: float, **more: float) -> None:
        self.graph.add_edge(a, b, kind, kind=kind, weight=weight, **more)

    # --- what others ask --------------------------------------------------------------------------------------

    @property
    def active(self) -> list[int]:
        return sorted(id for id, node in self.graph.nodes.items() if node["active"])

    def weight(self, kind: EdgeKind, a: int, b: int) -> float:
        """Of the edge of `kind` between two experts, or from a to b for a lineage; 0 where there is none."""
        if kind not in LINEAGE:
            a, b = min(a, b), max(a, b)
        return self.graph.edges[a, b, kind]["weight"] if self.graph.has_edge(a, b, kind) else 0.0

    def neighbours(self, id: int, kind: EdgeKind | None = None) -> list[Neighbour]:
        """Whom `id` has an edge with, either way, strongest first."""
        edges = [*self.graph.out_edges(id, keys=True, data="weight")]
        edges += [(b, a, key, weight) for a, b, key, weight in self.graph.in_edges(id, keys=True, data="weight")]
        found = [Neighbour(other, key, weight) for _, other, key, weight in edges if kind in (None, key)]
        return sorted(found, key=lambda n: (-n.weight, n.id, n.kind))

    def merge_candidates(self, threshold: float, *, most_together: float = MOST_TOGETHER) -> list[tuple[int, int]]:
        """Living pairs (older, younger) at least `threshold` alike, the most alike first.

        Pairs with a co-activation above `most_together` are left out: tokens that ask for both get an average of two
        opinions there, which one expert cannot give.
        """
        active = set(self.active)
        pairs = [
            (a, b)
            for a, b, kind, weight in self.graph.edges(keys=True, data="weight")
            if kind == "similarity" and weight >= threshold and {a, b} <= active
        ]
        pairs = [pair for pair in pairs if not self.wanted_together(*pair, most_together=most_together)]
        return sorted(pairs, key=lambda pair: (-self.weight("similarity", *pair), pair))

    def wanted_together(self, a: int, b: int, *, most_together: float = MOST_TOGETHER) -> bool:
        """Whether more than a fraction of the tokens that ask for one of two experts ask for the other too."""
        return self.weight("coactivation", a, b) > most_together

    def affinity(self, ids: Sequence[int | None]) -> NDArray[np.float64]:
        """(S, S), symmetric: how many tokens chose both of two experts, as the planner `affinity` wants it.

        `ids` names the expert on each seat, None a vacant one, whose row is zero. Zero diagonal.
        """
        logical_id_of = {id: logical_id for logical_id, id in enumerate(ids) if id is not None}
        together_SS = np.zeros((len(ids), len(ids)))
        for a, b, kind, tokens in self.graph.edges(keys=True, data="tokens"):
            if kind == "coactivation" and a in logical_id_of and b in logical_id_of:
                together_SS[logical_id_of[a], logical_id_of[b]] = together_SS[logical_id_of[b], logical_id_of[a]] = (
                    tokens
                )
        return together_SS

    # --- files and checkpoints --------------------------------------------------------------------------------

    def node_link(self) -> dict[str, Any]:
        """JSON values that `networkx.node_link_graph(..., edges="edges")` reads."""
        return nx.node_link_data(self.graph, edges="edges")

    def save(self, stem: Path) -> list[Path]:
        """Write `stem`.json (node-link) and `stem`.graphml, which has lists as JSON text and no nulls."""
        text, xml = stem.with_name(f"{stem.name}.json"), stem.with_name(f"{stem.name}.graphml")
        text.write_text(json.dumps(self.node_link(), indent=1), encoding="utf-8")
        flat = nx.MultiDiGraph()
        for id, node in self.graph.nodes.items():
            flat.add_node(id, **{k: json.dumps(v) if isinstance(v, list) else v for k, v in _known(node).items()})
        for a, b, kind, edge in self.graph.edges(keys=True, data=True):
            flat.add_edge(a, b, f"{kind}-{a}-{b}", **edge)  # GraphML wants keys that are unique
        nx.write_graphml(flat, xml)
        return [text, xml]

    def state_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {"edge_decay": self.edge_decay, "edge_floor": self.edge_floor, "graph": self.node_link()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave; decay and floor stay as this graph was made."""
        self.graph = nx.node_link_graph(state["graph"], edges="edges")


def specialisation(counts_C: NDArray[Any], seen_C: NDArray[np.bool_] | None = None) -> float:
    """1 - H(p) / log C of the classes that an expert saw: 0 where it saw all alike, 1 where it saw one.

    (Pielou 1966, doi 10.1016/0022-5193(66)90013-0: one minus the evenness.) Only classes of `seen_C` count for C, since
    nobody specialises in what does not come. 0 where nothing was seen, or one class is all there is.
    """
    counts = np.asarray(counts_C, dtype=float)
    classes = len(counts) if seen_C is None else int(np.count_nonzero(seen_C))
    if classes < 2 or not counts.sum():
        return 0.0
    p = counts[counts > 0] / counts.sum()
    return min(1.0, max(0.0, 1 + float((p * np.log(p)).sum()) / math.log(classes)))


def top_classes(counts_C: NDArray[Any]) -> list[int]:
    """Up to three classes that an expert saw most, the most frequent first."""
    order = np.argsort(-np.asarray(counts_C), kind="stable")[:TOP_CLASSES]
    return [int(c) for c in order if counts_C[c] > 0]


def _known(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
