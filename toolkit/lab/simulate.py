"""Prediction of step times from recorded loads, a placement, and the rates of a machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, NonNegativeFloat, PositiveFloat

from toolkit.experts.options import Options
from toolkit.experts.placement.cost_model import Cores, CostModel, LayerSeconds
from toolkit.experts.placement.loads import Floats
from toolkit.experts.placement.placement import ExpertPlacement


class Machine(Options):
    """Rates of one rank and its links, for one model. The rates of a layer are explained in `CostModel`."""

    seconds_per_row: NonNegativeFloat
    bytes_per_second: PositiveFloat
    seconds_per_slot: NonNegativeFloat = 0.0
    seconds_per_layer: NonNegativeFloat = 0.0
    seconds_per_row_sent: NonNegativeFloat = 0.0
    exchange_seconds: NonNegativeFloat = 0.0
    cores: Cores | None = None
    dense_seconds: NonNegativeFloat = 0.0
    """Seconds of a step outside of the MoE layers, without tokens; with averaging of gradients and the optimizer."""
    dense_seconds_per_token: NonNegativeFloat = 0.0
    top_k: Annotated[int, Field(ge=1)] = 1
    """Experts of a token: tokens are not recorded, and are computed by it."""
    optimizer_seconds_per_slot: NonNegativeFloat = 0.0
    """Seconds of clipping and of the optimizer for one slot of one layer."""

    def cost_model(self, *, row_bytes: int, weight_bytes: int, optimizer_bytes: int) -> CostModel:
        """Return the cost model of a layer; `row_bytes`: bytes of one pair in dispatch plus combine."""
        rates = {f.name: getattr(self, f.name) for f in fields(CostModel) if f.name in type(self).model_fields}
        return CostModel(**rates, row_bytes=row_bytes, weight_bytes=weight_bytes, optimizer_bytes=optimizer_bytes)


@dataclass(frozen=True)
class StepSeconds(LayerSeconds):
    """Seconds of each step, of all layers and outside of them, in parts of shape (steps,)."""

    dense: Floats
    optimizer: Floats

    @property
    def total(self) -> Floats:
        return np.sum(list(vars(self).values()), axis=0)


def simulate(
    loads: NDArray[Any], placements: Sequence[ExpertPlacement], cost_models: Sequence[CostModel], machine: Machine
) -> StepSeconds:
    """Predict the time of each step.

    Ranks wait for each other in every all-to-all, so each layer takes the time of its busiest rank. Assumes no overlap
    of computation and all-to-all, and one micro-batch per step.

    Args:
        loads: Pairs per rank and expert, shape (steps, layers, P, E).
        placements: The placement of each layer.
        cost_models: The cost model of each layer.
        machine: The costs outside of the layers.
    """
    layers = [
        cost_model.layer_seconds(loads[:, layer], placement)
        for layer, (placement, cost_model) in enumerate(zip(placements, cost_models, strict=True))
    ]
    parts = {name: np.sum([vars(layer)[name] for layer in layers], axis=0) for name in vars(layers[0])}
    until_last = cost_models[0].until_last
    tokens = loads[:, 0].sum(-1) / machine.top_k
    slots = np.sum([placement.slots_per_rank for placement in placements], axis=0)
    return StepSeconds(
        dense=until_last(machine.dense_seconds + tokens * machine.dense_seconds_per_token),
        optimizer=np.full(len(loads), until_last(slots * machine.optimizer_seconds_per_slot)),
        **parts,
    )
