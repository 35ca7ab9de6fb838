"""Predicts how long training steps take: from recorded loads, a placement, and the rates of a machine.

Letters as in `toolkit.experts.routing.metrics`, and `T` optimizer steps, `R` ranks of an EP group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from toolkit.errors import UserError
from toolkit.experts.placement.cost_model import Cores, CostModel
from toolkit.experts.placement.loads import Floats
from toolkit.experts.placement.placement import ExpertPlacement

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Rates of one rank and its links, for one model. Those that a layer needs are explained in `CostModel`."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    seconds_per_row: Seconds
    bytes_per_second: Rate
    seconds_per_slot: Seconds = 0.0
    seconds_per_layer: Seconds = 0.0
    seconds_per_row_sent: Seconds = 0.0
    exchange_seconds: Seconds = 0.0
    ranks_per_node: Count | None = None
    node_bytes_per_second: Rate | None = None
    cores: Cores | None = None
    dense_seconds: Seconds = 0.0
    """Seconds of a step outside of the MoE layers, without tokens; with averaging of gradients and the optimizer."""
    dense_seconds_per_token: Seconds = 0.0
    top_k: Count = 1
    """Assignments of a token in one layer: tokens are not recorded, and are computed by it."""
    nodes_per_token: Count | None = None
    optimizer_seconds_per_slot: Seconds = 0.0
    """Seconds of clipping and of the optimizer for one slot of one layer."""

    def cost_model(self, *, row_bytes: int, weight_bytes: int, optimizer_bytes: int) -> CostModel:
        """Returns the cost model of a layer; `row_bytes`: of one assignment in dispatch and combine together."""
        names = {field.name for field in fields(CostModel)} & {field.name for field in fields(self)}
        rates = {name: getattr(self, name) for name in names}
        return CostModel(**rates, row_bytes=row_bytes, weight_bytes=weight_bytes, optimizer_bytes=optimizer_bytes)


def read_machine(path: Path) -> Machine:
    """Reads a machine from a JSON file that has the names of `Machine`.

    Raises:
        UserError: If the file cannot be read, or has names or numbers that do not fit.
    """
    try:
        return TypeAdapter(Machine).validate_json(path.read_bytes(), strict=True)
    except OSError as error:
        raise UserError(f"--machine {path} cannot be read ({error.strerror}): give a JSON file of rates.") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "it"
        raise UserError(f"--machine {path}: {where}: {first['msg']}; give a JSON file of rates.") from None


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
    """Predicts how long each step takes.

    Ranks wait for each other in every all-to-all, so each layer takes the time of its busiest rank. S may be several EP
    groups of consecutive ranks; these wait for each other at the end of a step. Assumed: nothing runs beside an
    exchange, and all micro-batches of a step are one.

    Args:
        load_TLSE: The assignments of each rank to each expert.
        placements: The placement of each layer.
        costs: The cost model of each layer.
        machine: What a step takes outside of the layers.

    Raises:
        ValueError: If S is no multiple of the ranks of a placement.
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
