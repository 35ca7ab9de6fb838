"""The class of an experts module of another library before it is sharded, if it is loaded lazily, and afterwards."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from toolkit.errors import UserError
from toolkit.experts.compat import MovesParameters
from toolkit.experts.layer.recompute import recomputing
from toolkit.experts.layer.rows import Pairs
from toolkit.experts.layer.stack import ExpertLayer
from toolkit.experts.parallel.ownership import is_dtensor
from toolkit.experts.sharding.layout import Layout, extend

if TYPE_CHECKING:
    from jaxtyping import Float, Int

ReadRows = Callable[[nn.Module, Sequence[int]], dict[str, Tensor]]
"""(experts module, experts) to their rows by parameter, with zeros for an `EMPTY_ROW`: on the device and in the type of
the parameter, or packed, with further parameters that it gives the module."""


class ShardedExperts(ExpertLayer, Layout):
    """Mixed into the class of an experts module with a `Layout`: it computes the tokens of all ranks for its slots.

    The forward pass is a collective of the EP group.
    """

    first_three: inspect.Signature
    """The signature of the first three arguments of the own forward."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        # A further argument raises TypeError here: ranks that compute these tokens would not have it.
        hidden, ids_TK, weights_TK = self.first_three.bind(*args, **kwargs).arguments.values()
        if ids_TK.is_floating_point():
            ids_TK, weights_TK = weights_TK, ids_TK
        stack, x_TD = self.expert_stack, hidden.reshape(-1, hidden.shape[-1])
        _refuse_invalid(ids_TK, stack.num_experts)
        x_RD, dispatched = stack.dispatcher.receive(x_TD, ids_TK, weights_TK)
        y_RD = stack.timed(len(dispatched.pairs.order.pair), _compute, self, x_RD, dispatched.pairs)
        y_TD = stack.dispatcher.send_back(y_RD, dispatched)
        if not recomputing():
            stack.record(dispatched.plan, ids_TK, x_TD, weights_TK, y_TD)
        # Not a view, of which FSDP2 loses its hook if the caller changes it in place.
        return y_TD if y_TD.shape == hidden.shape else y_TD.view(hidden.shape)

    def without_tokens(self, x_TD: Float[Tensor, "T D"], weights_TK: Float[Tensor, "T K"]) -> tuple[Tensor, ...]:
        return x_TD, torch.empty(weights_TK.shape, dtype=torch.int64, device=x_TD.device), weights_TK


def _refuse_invalid(ids_TK: Int[Tensor, "T K"], num_experts: int) -> None:
    """Raise UserError for ids of no expert, on a CPU.

    On a GPU the kernels that sort by ids fail for them, and looking at them here would be a host sync.
    """
    if ids_TK.device.type == "cpu" and ids_TK.numel() and not torch.compiler.is_compiling():
        least, greatest = (int(each) for each in ids_TK.aminmax())
        if least < 0 or greatest >= num_experts:
            raise UserError(
                f"expert ids: {least if least < 0 else greatest} in a layer of {num_experts} experts. "
                "For a token without an expert, give any expert's id and the weight 0."
            )


def _compute(experts: ShardedExperts, x_RD: Float[Tensor, "R D"], pairs: Pairs) -> Float[Tensor, "R D"]:
    """Compute any number of pairs. Without pairs, parameters get gradients of zero."""
    if len(pairs.order.pair):
        return experts.compute_pairs(x_RD, pairs)
    rows_ND, rows_per_slot = pairs.permute(x_RD), pairs.order.rows_per_slot
    with torch.no_grad():  # for the type of the outputs; a gradient through a row of zeros may be NaN
        one_row = rows_per_slot.new_zeros(rows_per_slot.shape).index_fill_(0, rows_per_slot.new_zeros(1), 1)
        outputs = experts.compute_slots(rows_ND.new_zeros(1, rows_ND.shape[1]), one_row)
    # Parameters and all-to-all stay in the graph: their backward pass is a collective, too.
    parameters = {*experts.expert_stack.parameters.values(), *experts.parameters()}
    # FSDP2's shards of the stack are gathered in the module.
    nothing = [p.flatten()[:0].sum() for p in parameters if p.requires_grad and not is_dtensor(p)]
    return pairs.unpermute(rows_ND.to(outputs.dtype) + sum(nothing))


class LazyExperts(MovesParameters):
    """Mixed into the class of an experts module whose rows are read when it is sharded.

    Each parameter expands a single number. It cannot be called, and has no values to save.
    """

    read_rows: ReadRows

    def forward(self, *_: Any, **__: Any) -> NoReturn:
        raise UserError(
            "model: its experts are still in their files. Call ExpertParallel.prepare or shard_experts first, also on "
            "one process."
        )

    def state_dict(self, *args: Any, prefix: str = "", **kwargs: Any) -> Any:
        """Put parameters on the meta device, so that writing them raises; with `keep_vars` they are the parameters."""
        state: dict[str, Any] = super().state_dict(*args, prefix=prefix, **kwargs)
        for name, parameter in self.named_parameters(recurse=False):
            if state[prefix + name] is not parameter:
                state[prefix + name] = parameter.detach().to("meta")
        return state

    def moved(self, change: Callable[[Tensor], Tensor]) -> list[str]:
        """Change the one number that each parameter is."""
        for parameter in self.parameters(recurse=False):
            shape = parameter.shape
            parameter.data = change(parameter.data[(slice(1),) * parameter.ndim]).expand(shape)
        return [name for name, _ in self.named_parameters(recurse=False)]


def load_lazily(module: Any, read: ReadRows) -> None:
    """Have `read` give the rows of the experts module `module`, whose parameters expand a single number each."""
    extend(module, LazyExperts)
    module.read_rows = read


def own_type(module: nn.Module) -> type[Any]:
    """Return the class of `module`, without the mixin of lazy loading."""
    if not isinstance(module, LazyExperts):
        return type(module)
    _, own = type(module).__bases__
    return own


def forward_arguments(module: nn.Module) -> list[inspect.Parameter]:
    """Return the arguments of the forward of `module`, also while it is loaded lazily."""
    return list(inspect.signature(own_type(module).forward).parameters.values())[1:]
