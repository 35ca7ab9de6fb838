"""The numbers of a training run that must not depend on its layout, and their comparison with one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from benchmarks.support.precision import relative_difference
from tests.support.equality import assert_equal_rows
from toolkit.experts.parallel.ownership import ownership_of
from toolkit.experts.placement.placement import EMPTY_ROW

Rows = dict[str, Tensor]
"""Values by name of the parameter; rows of experts by name and expert id, "<name>/<id>"."""


@dataclass
class Outcome:
    """The numbers of a run on one rank."""

    losses: list[float] = field(default_factory=list)
    """Mean loss of each step over all ranks."""
    norms: list[float] = field(default_factory=list)
    """Gradient norm of each step before clipping; empty if the loop does not clip."""
    evaluations: list[float] = field(default_factory=list)
    """Mean loss of the test samples over all ranks after each step."""
    loads: list[dict[str, list[float]]] = field(default_factory=list)
    """By layer, the load of each expert in each step over all ranks."""
    gradients: list[Rows] = field(default_factory=list)
    """Clipped gradients of each step."""
    weights: Rows = field(default_factory=dict)
    states: Rows = field(default_factory=dict)
    """Optimizer states, "<name>.<key>" or "<name>.<key>/<id>"."""
    replicas: Rows = field(default_factory=dict)
    """Weights of replicas that other ranks own."""
    experts_here: list[int] = field(default_factory=list)
    """Number of experts of each sharded parameter on this rank."""
    moved: int = 0
    """Experts that migrated."""

    def add_loads(self, records: Mapping[str, Any]) -> None:
        """Record the loads among the records of a step."""
        self.loads.append({name: load_E for name, load_E in records.items() if name.startswith("moe/load/")})

    def watch(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Record the gradients with which each step of `optimizer` is made."""

        def record(*_: object) -> None:
            owned, replicas = rows_by_id(model, lambda p: p.grad)
            assert not any(row.any() for row in replicas.values()), "the owner of a row takes its replicas' gradients"
            self.gradients.append(owned)

        optimizer.register_step_pre_hook(record)

    def finish(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Record weights and optimizer states."""
        self.weights, self.replicas = rows_by_id(model, lambda p: p.detach())
        keys = {key for state in optimizer.state.values() for key in state}
        for key in sorted(keys):
            rows, _ = rows_by_id(model, lambda p, key=key: _as_tensor(optimizer.state.get(p, {}).get(key)), f".{key}")
            self.states |= rows
        owned = [ownership_of(p) for p in model.parameters()]
        self.experts_here = [sum(i != EMPTY_ROW for i in each.row_ids) for each in owned if each is not None]


def _as_tensor(value: Tensor | float | None) -> Tensor | None:
    return torch.tensor(value, dtype=torch.float64) if isinstance(value, int | float) else value


def rows_by_id(
    model: nn.Module, value_of: Callable[[nn.Parameter], Tensor | None], suffix: str = ""
) -> tuple[Rows, Rows]:
    """Return replicated and owned values, and values of replicas of other ranks' rows. A collective."""
    owned: Rows = {}
    replicas: Rows = {}
    for name, parameter in model.named_parameters():
        value = value_of(parameter)
        if value is None:
            continue
        value = (value.full_tensor() if isinstance(value, DTensor) else value.clone()).cpu()
        ownership = ownership_of(parameter)
        if ownership is None or value.ndim == 0:
            owned[f"{name}{suffix}"] = value
            continue
        for row, row_id, owns in zip(value, ownership.row_ids, ownership.owns, strict=True):
            if row_id != EMPTY_ROW:
                (owned if owns else replicas)[f"{name}{suffix}/{row_id}"] = row
    return owned, replicas


def gathered(ranks: Sequence[Rows]) -> Rows:
    """Return the rows of all ranks, after checking that rows of several ranks are bitwise identical."""
    found: Rows = {}
    for rows in ranks:
        for name, row in rows.items():
            assert name not in found or torch.equal(found[name], row), f"{name} differs between ranks"
            found[name] = row
    return found


def by_expert(expected: Rows, found: Rows) -> Rows:
    """Return `expected` with a row per expert for the tensors that `found` has by expert."""
    rows: Rows = {}
    for name, value in expected.items():
        is_stack = f"{name}/0" in found
        rows |= {f"{name}/{expert}": row for expert, row in enumerate(value)} if is_stack else {name: value}
    return rows


def assert_equals(ranks: Sequence[Outcome], expected: Outcome, tolerance: float) -> None:
    """Assert that the outcome of all ranks equals the outcome of one process.

    Args:
        ranks: The outcome of each rank.
        expected: The outcome of one process.
        tolerance: Largest relative difference, of rows relative to the norm of their parameter.
    """
    for rank in ranks:
        for name in ("losses", "norms", "evaluations"):
            found, wanted = (torch.tensor(getattr(each, name), dtype=torch.float64) for each in (rank, expected))
            assert found.shape == wanted.shape, name
            assert relative_difference(found, wanted) <= tolerance, name
        assert len(rank.loads) == len(expected.loads)
        for loads, wanted_loads in zip(rank.loads, expected.loads, strict=True):
            assert loads == {name: pytest.approx(load_E, rel=1e-12) for name, load_E in wanted_loads.items()}
    compared = [([rows for rank in ranks for rows in (rank.weights, rank.replicas)], expected.weights)]
    compared += [([rank.states for rank in ranks], expected.states)]
    steps = zip(*(rank.gradients for rank in ranks), strict=True)
    compared += [(list(rows), wanted) for rows, wanted in zip(steps, expected.gradients, strict=True)]
    for rows_of_ranks, wanted in compared:
        found = gathered(rows_of_ranks)
        assert_equal_rows(found, by_expert(wanted, found), tolerance)
