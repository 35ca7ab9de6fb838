"""Evaluation with unequal numbers of forward passes: ranks that are done keep serving their experts until all are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from toolkit.errors import UserError
from toolkit.experts.layer.dispatcher import AllToAllDispatcher
from toolkit.experts.layer.stack import ExpertLayer, ExpertStack
from toolkit.experts.sharding.found import outside_wrappers

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
NO_LAYER = 1 << 30
"""A number above any layer's, so that a rank that only serves does not count in the minimum."""


class _Meeting:
    """The all-reduce before each dispatch, by which ranks of an EP group learn which layer the others compute."""

    def __init__(self, layers: Sequence[tuple[str, nn.Module, ExpertLayer]]):
        self.layers = layers
        """Name, the module to call, which is the outermost wrapper, and the layer inside."""
        self.serving = False
        stack = layers[0][2].expert_stack
        self.device = stack.device
        self.group = stack.groups.ep_group

    def announce(self, number: int, x_TD: Tensor, weights_TK: Tensor) -> None:
        """Tell the others that this rank computes layer `number`, and shapes and dtypes of its rows."""
        if not self.serving:
            dtypes = [DTYPES.index(tensor.dtype) for tensor in (x_TD, weights_TK)]
            self.meet([number, -number, x_TD.shape[-1], weights_TK.shape[-1], *dtypes])

    def meet(self, mine: list[int]) -> list[int]:
        largest = torch.tensor(mine, device=self.device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group)
        last, first, *rest = largest.tolist()
        if last > 0 and last != -first:
            names = self.layers[-first - 1][0], self.layers[last - 1][0]
            raise UserError(
                f"join: ranks are in different layers, {names[0]!r} and {names[1]!r}. Call the full model on all ranks."
            )
        return [last, *rest]

    def serve(self) -> None:
        """Compute the other ranks' tokens with none of this rank, until no rank computes any more."""
        self.serving = True
        while True:
            number, width, top_k, *dtypes = self.meet([0, -NO_LAYER, 0, 0, 0, 0])
            if number == 0:
                return
            _, module, layer = self.layers[number - 1]
            of_rows, of_weights = (DTYPES[dtype] for dtype in dtypes)
            x_TD = torch.empty(0, width, dtype=of_rows, device=self.device)
            module(*layer.without_tokens(x_TD, x_TD.new_empty(0, top_k, dtype=of_weights)))


def _refuse_copy(*_: Tensor) -> None:
    raise UserError(
        "join: a copy of the model (an EMA, a reference model) was called that was not named. "
        "Name all models that are called, as in experts.join(model, copy)."
    )


@contextmanager
def join_forwards(models: Sequence[nn.Module], stacks: Sequence[ExpertStack]) -> Iterator[None]:
    """Let each rank call `models` any number of times, without gradients. A collective at the end.

    Args:
        models: All models that are called, the same on each rank.
        stacks: Of the prepared model. Calls of other models with these stacks, or copies of them, raise UserError.
    """
    served: dict[ExpertStack, tuple[str, nn.Module, ExpertLayer]] = {}
    for model in models:
        for name, module in model.named_modules():
            if isinstance(module, ExpertLayer):
                outermost = model.get_submodule(outside_wrappers(name))
                served.setdefault(module.expert_stack, (name, outermost, module))
    with torch.no_grad():
        if not served or not all(isinstance(stack.dispatcher, AllToAllDispatcher) for stack in served):
            yield  # every rank has all experts
            return
        meeting = _Meeting(list(served.values()))
        family = {each for stack in [*stacks, *served] for each in (stack, *stack.all_copies())}
        try:
            for stack in family - served.keys():
                stack.dispatcher.announce = _refuse_copy
            for number, stack in enumerate(served, start=1):
                stack.dispatcher.announce = partial(meeting.announce, number)
            yield
            meeting.serve()
        finally:
            for stack in family:
                stack.dispatcher.announce = None
