"""Check experts before they are sharded: all that would go wrong without an error, before anything is changed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from toolkit.errors import UserError, one_line
from toolkit.experts.layer.moe_layer import MoE
from toolkit.experts.placement.placement import ExpertPlacement
from toolkit.experts.sharding.call import Forward, compute_rows, in_order_of_slots
from toolkit.experts.sharding.find import num_experts, outside_wrappers, stacked_parameters

TOKENS = 6
FEW = 4
"""Experts that get memory for the trial."""
MOST_TOKENS = 8
"""Tokens at a time when every expert is called, because some modules copy the rows of each token's experts."""
IN_ROWS = "keep what differs between experts in parameters with a row for each expert"
MOST_ROUNDING = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.05}
"""The largest relative difference by precision; parts may compute in another. A mismatch is a tenth or more."""


def check_experts(
    model: nn.Module, layers: Mapping[str, nn.Module], placements: Mapping[str, ExpertPlacement]
) -> dict[str, Forward]:
    """Check that the `layers` of `model` can be sharded by `placements`, and compute the same afterwards.

    Returns:
        The forward of each experts module with the arguments (hidden, expert ids, weights), in this order.

    Raises:
        UserError: They cannot. The same on every rank.
    """
    if fault := next(_faults(model, layers, placements), None):
        raise UserError(fault)
    return {name: _tried(name, module) for name, module in layers.items() if not isinstance(module, MoE)}


def _faults(
    model: nn.Module, layers: Mapping[str, nn.Module], placements: Mapping[str, ExpertPlacement]
) -> Iterator[str]:
    """Yield a message for experts that are sharded already, share a parameter, or have a placement of others."""
    inside = [f"{name}.experts" if isinstance(m, MoE) else outside_wrappers(name) for name, m in layers.items()]
    prefixes = tuple(f"{name}.".lstrip(".") for name in inside)
    holder_of: dict[int, str] = {}
    for name, module in model.named_modules():
        if not f"{name}.".startswith(prefixes):
            holder_of |= {_memory(p): f"{name}.{key}" for key, p in module.named_parameters(recurse=False)}
    for name, module in layers.items():
        stack: Any = vars(module).get("expert_stack")
        parameters = stacked_parameters(module)[0].values()
        is_ours_and_whole = isinstance(module, MoE) and stack is not None and stack.groups.ep_size == 1
        if (stack is not None and not is_ours_and_whole) or any(isinstance(p, DTensor) for p in parameters):
            yield f"model: the experts at {name!r} are sharded already. Give a model that is not."
        for parameter in parameters:
            if (first := holder_of.setdefault(_memory(parameter), name)) != name:
                yield (
                    f"model: the experts at {name!r} share a parameter with {first!r}, and each rank would keep a part "
                    "of it. Use one module in both places, or parameters for each."
                )
        if (placed := placements[name].num_experts) != num_experts(module):
            yield f"placement: {placed} experts for {name!r}, which has {num_experts(module)}. Place each once."


def _memory(parameter: Tensor) -> int:
    """Return a number that parameters have in common if they are one table."""
    return (parameter.data_ptr() if type(parameter.data) is Tensor else 0) or id(parameter)


@torch.no_grad()
def _tried(name: str, module: nn.Module) -> Forward:
    """Try whether `module` computes the same when each rank calls it with its own experts only.

    Meanwhile its parameters have random rows, and buffers with a row per expert random values, in evaluation mode.

    Returns:
        The forward of (hidden, expert ids, weights), in this order.
    """
    own: Forward = module.forward
    first = next(module.parameters(recurse=False))
    if first.is_meta or first.dtype not in MOST_ROUNDING:
        return own  # no values to compute with yet, or quantised
    weights_first: Any = partial(_weights_first, own)
    weights_first.__signature__ = inspect.signature(own)
    refusal: UserError | None = None
    for forward in (own, weights_first):
        try:
            _Trial(f"model: the experts at {name!r} ({type(module).__name__})", module, forward).run()
        except UserError as error:
            refusal = refusal or error
        else:
            return forward
    assert refusal is not None
    raise refusal


def _weights_first(forward: Forward, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    return forward(hidden, weights, ids)


class _Trial:
    """A trial of one experts module by one order of its arguments."""

    def __init__(self, kind: str, module: nn.Module, forward: Forward):
        self.kind, self.module, self.forward = kind, module, forward
        self.experts = int(module.num_experts)  # type: ignore[arg-type]
        self.like = next(module.parameters(recurse=False)).data
        self.draws = torch.Generator().manual_seed(0)
        self.buffers = {
            key: value
            for key, value in module.named_buffers()
            if value.ndim > 0 and len(value) == self.experts and value.is_floating_point()
        }
        """Buffers with a row per expert."""

    def run(self) -> None:
        few = min(self.experts, FEW)
        with self._random_buffers():
            with self._having(few, lambda data: self._random_rows(few, data)):
                width = self._accepted_width(few)
                ids = torch.arange(1, few + 1, device=self.like.device) % few
                for chosen_S in ids.split(2):  # each expert is in another slot than its own
                    self._compare_with_slots(chosen_S, width)
            with self._having(self.experts, self._same_row):
                self._compare_all(width)

    def _accepted_width(self, experts: int) -> int:
        """Return the width D that the module takes, which is among its sizes."""
        # No expert has two rows: a module that pads rows may then take a wrong width.
        top_k = min(experts, 2)
        ids_TK = torch.arange(experts // top_k * top_k, device=self.like.device).view(-1, top_k)
        sizes = [value for value in vars(self.module).values() if type(value) is int and value > 0]
        sizes += [size for parameter in self.module.parameters(recurse=False) for size in parameter.shape[1:]]
        refusal = "it has no sizes"
        for width in dict.fromkeys(sizes):
            x_TD = self._tokens(len(ids_TK), width)
            try:
                found: Any = self.forward(x_TD, ids_TK, torch.ones_like(ids_TK).to(x_TD))
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
            f"{self.kind} cannot be called with hidden (T, D), expert ids (T, K) and weights (T, K) for an output "
            f"(T, D): {refusal}. Give them this interface, with ids that tokens choose."
        )

    def _compare_with_slots(self, chosen_S: Tensor, width: int) -> None:
        """Compare the experts `chosen_S` of this module with the same rows in slots of their own."""
        slots = len(chosen_S)
        rows = torch.arange(TOKENS, device=self.like.device)
        slots_TK = (rows[:, None] + torch.arange(min(slots, 2), device=self.like.device)).remainder(slots)
        x_TD, ones_TK = self._tokens(TOKENS, width), torch.ones_like(slots_TK).to(self.like)
        weights_TK = (0.2 + 0.3 * torch.rand(slots_TK.shape, generator=self.draws)).to(self.like)
        for weights, remedy in (
            (ones_TK, IN_ROWS),
            (weights_TK, "multiply the outputs of experts by their weights, not their inputs"),
        ):
            whole_TD = self.forward(x_TD, chosen_S[slots_TK], weights)
            with self._having(slots, lambda data: data[chosen_S]):
                y_TD = in_order_of_slots(self._compute, self.module, x_TD, slots_TK, weights)
            self._require_equal(whole_TD, y_TD, remedy)

    def _compute(self, _: nn.Module, rows_ND: Tensor, rows_per_slot: Tensor) -> Tensor:
        return compute_rows(self.forward, rows_ND, rows_per_slot)

    def _compare_all(self, width: int) -> None:
        """Compare all experts, which have the same row, with the first one on one token."""
        token_1D = self._tokens(1, width)
        expected_D: Tensor | None = None
        for ids_T1 in torch.arange(self.experts, device=self.like.device).unsqueeze(1).split(MOST_TOKENS):
            y_TD = self.forward(token_1D.repeat(len(ids_T1), 1), ids_T1, torch.ones_like(ids_T1).to(self.like))
            expected_D = y_TD[0] if expected_D is None else expected_D
            self._require_equal(expected_D.expand_as(y_TD), y_TD, IN_ROWS)

    def _require_equal(self, expected: Tensor, found: Tensor, remedy: str) -> None:
        difference = ((found - expected).norm() / expected.norm()).item()
        if not difference <= MOST_ROUNDING[self.like.dtype]:  # NaN if no expert was found
            held = f", and buffer {next(iter(self.buffers))!r} is not moved with them" if self.buffers else ""
            raise UserError(
                f"{self.kind} compute something else when they are sharded{held} (relative difference "
                f"{difference:.2g}). {remedy[0].upper()}{remedy[1:]}."
            )

    def _tokens(self, number: int, width: int) -> Tensor:
        return torch.randn(number, width, generator=self.draws).to(self.like)

    def _random_rows(self, experts: int, like: Tensor) -> Tensor:
        """Return random rows that keep the norm of what they multiply: the same numbers, shifted by one in each row."""
        scale, size = max(like.shape[1:], default=1) ** -0.5, like.shape[1:].numel()
        numbers = torch.empty(size + experts - 1, dtype=like.dtype).normal_(std=scale, generator=self.draws)
        return numbers.unfold(0, size, 1).contiguous().view(experts, *like.shape[1:]).to(like.device)

    def _same_row(self, data: Tensor) -> Tensor:
        """One random row for all experts, in memory of its own if the experts have it."""
        rows = self._random_rows(1, data).expand(data.shape)
        return rows.contiguous() if data.is_contiguous() else rows

    @contextmanager
    def _random_buffers(self) -> Iterator[None]:
        before, was_training = {key: value.clone() for key, value in self.buffers.items()}, self.module.training
        try:
            for value in self.buffers.values():
                value.copy_(self._random_rows(self.experts, value))
            self.module.eval()
            yield
        finally:
            self.module.train(was_training)
            for key, value in self.buffers.items():
                value.copy_(before[key])

    @contextmanager
    def _having(self, experts: int, rows: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """Leave the module so many `experts`, and what `rows` makes of each of its parameters."""
        before = self.module.num_experts
        whole = [(parameter, parameter.data) for parameter in self.module.parameters(recurse=False)]
        try:
            for parameter, data in whole:
                parameter.data = rows(data)
            self.module.num_experts = experts  # type: ignore[assignment]
            yield
        finally:
            for parameter, data in whole:
                parameter.data = data
            self.module.num_experts = before
