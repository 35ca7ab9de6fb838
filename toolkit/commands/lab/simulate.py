"""Predicts how long training steps take: from recorded loads, a placement, and the rates of a machine.

Letters as in `toolkit.experts.routing.metrics`, and `T` optimizer steps, `R` ranks of an EP group.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.errors import UserError
from toolkit.experts.placement.cost_model import Cores, CostModel
from toolkit.experts.placement.loads import Floats
from toolkit.experts.placement.placement import ExpertPlacement


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Rates of one rank and its links, for one model. Those that a layer needs are explained in `CostModel`."""

    seconds_per_row: float
    bytes_per_second: float
    seconds_per_slot: float = 0.0
    seconds_per_layer: float = 0.0
    seconds_per_row_sent: float = 0.0
    exchange_seconds: float = 0.0
    ranks_per_node: int | None = None
    node_bytes_per_second: float | None = None
    cores: Cores | None = None
    dense_seconds: float = 0.0
    """Of a step outside of the MoE layers, without tokens, averaging of gradients and the optimizer's work included."""
    dense_seconds_per_token: float = 0.0
    top_k: int = 1
    """Assignments of a token in one layer: tokens are not recorded, and are computed by it."""
    nodes_per_token: int | None = None
    optimizer_seconds_per_slot: float = 0.0
    """Of clipping and the optimizer, for one slot of one layer."""

    def cost_model(self, *, row_bytes: int, weight_bytes: int, optimizer_bytes: int) -> CostModel:
        """Of a layer; `row_bytes`: those of one assignment in dispatch and combine together."""
        names = {field.name for field in fields(CostModel)} & {field.name for field in fields(self)}
        rates = {name: getattr(self, name) for name in names}
        return CostModel(**rates, row_bytes=row_bytes, weight_bytes=weight_bytes, optimizer_bytes=optimizer_bytes)

    def to_dict(self) -> dict[str, Any]:
        """What JSON can hold."""
        return asdict(self)


def read_machine(path: Path) -> Machine:
    """The machine that the JSON file `path` describes, by the names of `Machine`.

    Raises UserError where it cannot be read, and for names and numbers that do not fit."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"--machine {path} does not exist: give a JSON file of rates.") from None
    except (OSError, ValueError) as error:
        raise UserError(f"--machine {path} cannot be read ({error}): give a JSON file of rates.") from None
    if not isinstance(found, dict):
        raise UserError(f"--machine {path} holds no object: give rates by name.")
    rates = {field.name for field in fields(Machine)}
    cores = found.pop("cores", None)
    _check(path, found, rates - {"cores"}, {"seconds_per_row", "bytes_per_second"}, "")
    if cores is not None:
        if not isinstance(cores, dict):
            raise UserError(f"--machine {path}: cores is {cores!r}: take an object with count and busy_slowdown.")
        _check(path, cores, {"count", "busy_slowdown"}, {"count"}, "cores.")
        cores = Cores(**cores)
    return Machine(**found, cores=cores)


def _check(path: Path, numbers: dict[str, Any], known: set[str], needed: set[str], prefix: str) -> None:
    """Raise UserError unless `numbers` has what is needed, nothing else than is known, and numbers that can be."""
    for name in [*sorted(needed - numbers.keys()), *sorted(numbers.keys() - known)]:
        what = "is missing: add it" if name in needed else f"is no rate: take {', '.join(sorted(known))}"
        raise UserError(f"--machine {path}: {prefix}{name} {what}.")
    for name, value in numbers.items():
        whole = name in ("count", "top_k", "ranks_per_node", "nodes_per_token")
        may_be_zero = not whole and not name.endswith("bytes_per_second") and name != "busy_slowdown"
        is_number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value < 0 or (value == 0 and not may_be_zero):
            kind = "a whole number above 0" if whole else "0 or more" if may_be_zero else "a number above 0"
            raise UserError(f"--machine {path}: {prefix}{name} is {value!r}: take {kind}.")


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of each step, and their parts on the slowest EP group."""

    dense_T: Floats
    router_T: Floats
    experts_T: Floats
    exchanges_T: Floats
    replicas_T: Floats
    optimizer_T: Floats

    @property
    def total_T(self) -> Floats:
        return sum(vars(self).values(), start=np.zeros(len(self.dense_T)))


def simulate(
    load_TLSE: NDArray[Any],
    placements: Sequence[ExpertPlacement],
    costs: Sequence[CostModel],
    machine: Machine,
) -> StepSeconds:
    """Predict each step of `load_TLSE`, assignments of each rank to each expert, under one placement and cost model per
    layer.

    Ranks wait for each other in every all-to-all, so each layer takes the time of its busiest rank. S may be several EP
    groups of consecutive ranks; these wait for each other at the end of a step. Assumed: nothing runs beside an
    exchange, and all micro-batches of a step are one. Raises ValueError where S is no multiple of the ranks of a
    placement.
    """
    load = np.asarray(load_TLSE)
    ranks = placements[0].ranks
    if load.shape[2] % ranks:
        raise ValueError(f"{load.shape[2]} sources are no multiple of the {ranks} ranks of a placement")
    groups = [
        _group(load[:, :, first : first + ranks], placements, costs, machine)
        for first in range(0, load.shape[2], ranks)
    ]
    totals_GT = np.stack([group.total_T for group in groups])
    slowest_T = totals_GT.argmax(0)
    steps = np.arange(len(load))
    parts = {name: np.stack([vars(group)[name] for group in groups])[slowest_T, steps] for name in vars(groups[0])}
    return StepSeconds(**parts)


def _group(
    load_TLRE: NDArray[Any],
    placements: Sequence[ExpertPlacement],
    costs: Sequence[CostModel],
    machine: Machine,
) -> StepSeconds:
    """One EP group."""
    steps = len(load_TLRE)
    layers = [
        cost.layer_seconds(load_TLRE[:, layer], placement)
        for layer, (placement, cost) in enumerate(zip(placements, costs, strict=True))
    ]
    tokens_TR = load_TLRE[:, 0].sum(-1) / machine.top_k
    slots_R = np.sum([placement.slots_per_rank for placement in placements], axis=0)
    together = costs[0].together
    optimizer = float(together(slots_R * machine.optimizer_seconds_per_slot))
    parts = {
        f"{name}_T": np.sum([np.broadcast_to(getattr(layer, name), steps) for layer in layers], axis=0)
        for name in ("router", "experts", "exchanges", "replicas")
    }
    return StepSeconds(
        dense_T=together(machine.dense_seconds + tokens_TR * machine.dense_seconds_per_token),
        optimizer_T=np.full(steps, optimizer),
        **parts,
    )
