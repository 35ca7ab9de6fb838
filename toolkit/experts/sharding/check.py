"""Check experts before they are sharded: all that would go wrong without an error, before anything is changed."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from toolkit.errors import UserError, one_line
from toolkit.experts.compat import with_tables
from toolkit.experts.placement.placement import ExpertPlacement
from toolkit.experts.sharding.found import FoundExperts
from toolkit.experts.sharding.layout import CalledByIds, Layout, pairs_of

TOKENS = 6
FEW = 4
"""Experts that get memory for the trial."""
MOST_TOKENS = 8
"""Tokens at a time when every expert is called, because some modules copy the rows of each token's experts."""
IN_ROWS = "keep what differs between experts in parameters with a row for each expert"
MOST_ROUNDING = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.05}
"""The largest relative difference by precision; parts may compute in another. A mismatch is a tenth or more."""


def check_experts(
    model: nn.Module, layers: Mapping[str, FoundExperts], placements: Mapping[str, ExpertPlacement]
) -> None:
    """Check that the `layers` of `model` can be sharded by `placements`, and compute the same afterwards.

    Finds the order of their arguments. Layers of one kind are tried once.

    Raises:
        UserError: They cannot. The same on every rank.
    """
    if fault := next(_faults(model, layers, placements), None):
        raise UserError(fault)
    tried: dict[Hashable, bool] = {}
    for found in layers.values():
        if found.is_tried:
            if (kind := found.kind) not in tried:
                tables = found.tables()
                tried[kind] = _weights_come_first(found, tables)
            found.weights_first = tried[kind]


def _faults(
    model: nn.Module, layers: Mapping[str, FoundExperts], placements: Mapping[str, ExpertPlacement]
) -> Iterator[str]:
    """Yield a message for experts that are sharded already, share a parameter, or have a placement of others."""
    prefixes = tuple(f"{found.path}.".lstrip(".") for found in layers.values())
    holder_of: dict[int, str] = {}
    for name, module in model.named_modules():
        if not f"{name}.".startswith(prefixes):
            holder_of |= {_memory(p): f"{name}.{key}" for key, p in module.named_parameters(recurse=False)}
    for name, found in layers.items():
        parameters = [parameter for parameter, _ in found.parameters().values()]
        if found.is_sharded or any(isinstance(p, DTensor) for p in parameters):
            yield f"model: the experts at {name!r} are sharded already. Give a model that is not."
        if "forward" in vars(found.module):
            yield (
                f"model: the forward of the experts at {name!r} was replaced on the module, and sharded experts "
                "would not call it. Shard the model first."
            )
        if (shared := found.shared_parameter) is not None and placements[name].ranks > 1:
            yield (
                f"model: all experts at {name!r} share {shared!r}, and each rank would train it by its own experts' "
                "tokens only. Freeze it, or move it out of the module."
            )
        if found.adapters is not None and (fault := found.adapters.fault(name)):
            yield fault
        for parameter in parameters:
            if (first := holder_of.setdefault(_memory(parameter), name)) != name:
                yield (
                    f"model: the experts at {name!r} share a parameter with {first!r}, and each rank would keep a part "
                    "of it. Use one module in both places, or parameters for each."
                )
        if (placed := placements[name].num_experts) != found.num_experts:
            yield f"placement: {placed} experts for {name!r}, which has {found.num_experts}. Place each once."


def _memory(parameter: Tensor) -> int:
    """Return a number that parameters have in common if they are one table."""
    return (parameter.data_ptr() if type(parameter.data) is Tensor else 0) or id(parameter)


def _weights_come_first(found: FoundExperts, tables: Mapping[str, Tensor]) -> bool:
    """Try whether the experts compute the same when each rank calls them with its own experts only, in either order of
    the arguments.

    Args:
        found: The experts.
        tables: Their own parameters as rows (E, ...).

    Returns:
        Whether weights come before expert ids.
    """
    layout = found.layout
    refusal: UserError | None = None
    for weights_first in (False, True) if layout is not None and issubclass(layout, CalledByIds) else (False,):
        try:
            _Trial(found, tables, weights_first).run()
        except UserError as error:
            refusal = refusal or error
        else:
            return weights_first
    assert refusal is not None
    raise refusal


class _Trial:
    """A trial of one experts module by one order of its arguments, on copies with random rows."""

    def __init__(self, found: FoundExperts, tables: Mapping[str, Tensor], weights_first: bool):
        module = found.module
        self.title = f"model: the experts at {found.name!r} ({found.type_with_layout.__name__})"
        self.module, self.experts, self.weights_first = module, found.num_experts, weights_first
        self.type = found.type_with_layout
        self.tables = tables
        self.like = next(iter(tables.values()))
        self.draws = torch.Generator().manual_seed(0)
        self.buffers = {
            name: self._random_rows(self.experts, value)
            for name, value in module.named_buffers()
            if value.ndim > 0 and len(value) == self.experts and value.is_floating_point()
        }
        """Random values of buffers with a row per expert."""

    @torch.no_grad()
    def run(self) -> None:
        few = min(self.experts, FEW)
        rows = {name: self._random_rows(few, value) for name, value in self.tables.items()}
        experts = self._copy(few, rows)
        width = self._accepted_width(experts, few)
        ids = torch.arange(1, few + 1, device=self.like.device) % few
        for chosen_S in ids.split(2):  # each expert is in another slot than its own
            self._compare_with_slots(experts, rows, chosen_S, width)
        self._compare_all(
            self._copy(self.experts, {n: self._same_row(value) for n, value in self.tables.items()}), width
        )

    def _copy(self, experts: int, rows: Mapping[str, Tensor]) -> Any:
        """Return a copy of the module with so many experts and these rows, in evaluation mode."""
        copied: Any = with_tables(self.module, self.type, rows).eval()
        copied.num_experts = experts
        for name, value in copied.named_buffers():
            value.copy_(self.buffers.get(name, value))
        if self.weights_first:
            copied.weights_first = True
        return copied

    def _call(self, experts: nn.Module, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return experts.forward(hidden, *((weights, ids) if self.weights_first else (ids, weights)))

    def _accepted_width(self, experts: nn.Module, number: int) -> int:
        """Return the width D that the module takes, which is among its sizes."""
        # No expert has two rows: a module that pads rows may then take a wrong width.
        top_k = min(number, 2)
        ids_TK = torch.arange(number // top_k * top_k, device=self.like.device).view(-1, top_k)
        sizes = [value for value in vars(self.module).values() if type(value) is int and value > 0]
        sizes += [size for table in self.tables.values() for size in table.shape[1:]]
        refusal = "it has no sizes"
        for width in dict.fromkeys(sizes):
            x_TD = self._tokens(len(ids_TK), width)
            try:
                found: Any = self._call(experts, x_TD, ids_TK, torch.ones_like(ids_TK).to(x_TD))
            except Exception as error:
                refusal = one_line(error)
                continue
            if not isinstance(found, Tensor):
                refusal = f"it returns a {type(found).__name__}"
                break
            if found.shape == x_TD.shape:
                return width
            refusal = f"it returns a tensor of shape {tuple(found.shape)}"
        raise UserError(
            f"{self.title} cannot be called with hidden (T, D), expert ids (T, K) and weights (T, K) for an output "
            f"(T, D): {refusal}. Give them this interface, with ids that tokens choose."
        )

    def _compare_with_slots(self, experts: Layout, rows: Mapping[str, Tensor], chosen_S: Tensor, width: int) -> None:
        """Compare the experts `chosen_S` of this module with the same rows in slots of their own."""
        slots = len(chosen_S)
        part = self._copy(slots, {name: value[chosen_S] for name, value in rows.items()})
        token_T = torch.arange(TOKENS, device=self.like.device)
        slots_TK = (token_T[:, None] + torch.arange(min(slots, 2), device=self.like.device)).remainder(slots)
        x_TD, ones_TK = self._tokens(TOKENS, width), torch.ones_like(slots_TK).to(self.like)
        weights_TK = (0.2 + 0.3 * torch.rand(slots_TK.shape, generator=self.draws)).to(self.like)
        for weights, remedy in (
            (ones_TK, IN_ROWS),
            (weights_TK, "multiply the outputs of experts by their weights, not their inputs"),
        ):
            whole_TD = self._call(experts, x_TD, chosen_S[slots_TK], weights)
            y_TD = part.compute_pairs(x_TD, pairs_of(slots_TK, weights, slots))
            self._require_equal(whole_TD, y_TD, remedy)

    def _compare_all(self, experts: nn.Module, width: int) -> None:
        """Compare all experts, which have the same row, with the first one on one token."""
        token_1D = self._tokens(1, width)
        expected_D: Tensor | None = None
        for ids_T1 in torch.arange(self.experts, device=self.like.device).unsqueeze(1).split(MOST_TOKENS):
            ones_T1 = torch.ones_like(ids_T1).to(self.like)
            y_TD = self._call(experts, token_1D.repeat(len(ids_T1), 1), ids_T1, ones_T1)
            expected_D = y_TD[0] if expected_D is None else expected_D
            self._require_equal(expected_D.expand_as(y_TD), y_TD, IN_ROWS)

    def _require_equal(self, expected: Tensor, found: Tensor, remedy: str) -> None:
        difference = ((found - expected).norm() / expected.norm()).item()
        if not difference <= MOST_ROUNDING[self.like.dtype]:  # NaN if no expert was found
            held = f", and buffer {next(iter(self.buffers))!r} is not moved with them" if self.buffers else ""
            raise UserError(
                f"{self.title} compute something else when they are sharded{held} (relative difference "
                f"{difference:.2g}). {remedy[0].upper()}{remedy[1:]}."
            )

    def _tokens(self, number: int, width: int) -> Tensor:
        return torch.randn(number, width, generator=self.draws).to(self.like)

    def _random_rows(self, experts: int, like: Tensor) -> Tensor:
        """Return random rows that keep the norm of what they multiply: the same numbers, shifted by one in each row."""
        scale, size = max(like.shape[1:], default=1) ** -0.5, like.shape[1:].numel()
        numbers = torch.empty(size + experts - 1, dtype=like.dtype).normal_(std=scale, generator=self.draws)
        return numbers.unfold(0, size, 1).contiguous().view(experts, *like.shape[1:]).to(like.device)

    def _same_row(self, table: Tensor) -> Tensor:
        """One random row for all experts, in memory of its own if the experts have it."""
        rows = self._random_rows(1, table).expand(table.shape)
        return rows.contiguous() if table.is_contiguous() else rows
