"""Penalties on the weights of a model whose experts are sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from toolkit.errors import require
from toolkit.experts.parallel.ownership import is_dtensor, is_owned, ownership_of

if TYPE_CHECKING:
    from jaxtyping import Float


def parameter_penalty(function: Callable[[Tensor], Tensor], parameters: Iterable[Tensor]) -> Float[Tensor, ""]:
    """Return a penalty on parameters, whose value and gradient equal one process's. A collective of the EP group.

    A replica of an expert counts once, and the value covers the experts of all ranks. Add the penalty to the loss of
    each rank.

    Args:
        function: Maps a parameter to values that are summed, such as its squares. For experts, dimension 0 of the
            result has this rank's slots, as the parameter has, and each expert's values depend on its own row only.
        parameters: Parameters of the model.

    Returns:
        The sum over all parameters, a scalar.

    Raises:
        UserError: The values of sharded experts do not have a row per slot.

    Example:
        >>> import torch
        >>> from toolkit import experts
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> start = {p: p.detach().clone() + 1 for p in model.parameters()}
        >>> round(experts.parameter_penalty(lambda p: (p - start[p]).square(), model.parameters()).item(), 4)
        2.0
    """
    common, rows, group = [], [], None
    for parameter in parameters:
        values = function(parameter)
        ownership = ownership_of(parameter)
        if ownership is None or not is_owned(parameter):
            total = values.sum()
            common.append(total.full_tensor() if is_dtensor(total) else total)
        else:
            group = ownership.groups.ep_group
            shape, slots = tuple(values.shape), len(ownership.owns)
            remedy = f"return values with a row for each of {slots} slots, such as squares, not their sum"
            require(shape[:1] == (slots,), "function(parameter).shape", shape, remedy)
            rows.append(values[torch.tensor(ownership.owns, device=values.device)].sum())
    penalty = torch.stack(common).sum() if common else torch.zeros(())
    if not rows:
        return penalty
    here = torch.stack(rows).sum()
    everywhere = here.detach().clone()
    dist.all_reduce(everywhere, group=group)
    return penalty.to(here.device) + here + (everywhere - here.detach())
