"""Evaluation with unequal numbers of forwards: ranks that are done serve their experts until all are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from toolkit.errors import UserError
from toolkit.hosts.foreign import outside_wrappers
from toolkit.moe.dispatch import AllToAllDispatcher
from toolkit.moe.layer import MoE
from toolkit.moe.stack import ExpertStack

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MOST_LAYERS = 1 << 30


class _Meeting:
    """What ranks of an EP group tell each other before each dispatch: at which layer those are that compute."""

    def __init__(self, model: nn.Module, stacks: Mapping[str, ExpertStack]):
        self.layers = [(name, model.get_submodule(outside_wrappers(name)), stack) for name, stack in stacks.items()]
        self.serving = False
        self.device = next(model.parameters()).device
        self.group = self.layers[0][2].groups.ep_group

    def announce(self, number: int, x_TD: Tensor, expert_ids_TK: Tensor) -> None:
        """To be called by a rank that computes layer `number`."""
        if not self.serving:
            self.meet([number, -number, x_TD.shape[-1], DTYPES.index(x_TD.dtype), expert_ids_TK.shape[-1]])

    def meet(self, mine: list[int]) -> list[int]:
        largest = torch.tensor(mine, device=self.device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group)
        last, first, *rest = largest.tolist()
        if last > 0 and last != -first:
            names = self.layers[-first - 1][0], self.layers[last - 1][0]
            raise UserError(
                f"ranks are in different layers, {names[0]!r} and {names[1]!r}, in join: call the whole model on all."
            )
        return [last, *rest]

    def serve(self) -> None:
        """Compute for the others with no rows of one's own, until nobody computes any more."""
        self.serving = True
        while True:
            number, width, dtype, top_k = self.meet([0, -MOST_LAYERS, 0, 0, 0])
            if number == 0:
                return
            _, module, _ = self.layers[number - 1]
            x_TD = torch.empty(0, width, dtype=DTYPES[dtype], device=self.device)
            if isinstance(module, MoE):
                module(x_TD)
            else:
                ids_TK = torch.empty(0, top_k, dtype=torch.int64, device=self.device)
                module(x_TD, ids_TK, x_TD.new_empty(0, top_k))


@contextmanager
def join_forwards(model: nn.Module, stacks: Mapping[str, ExpertStack]) -> Iterator[None]:
    """Within it, without gradients, each rank may call `model` as often as it likes. Its end waits for all ranks."""
    dispatchers = [stack.dispatcher for stack in stacks.values()]
    with torch.no_grad():
        if not all(isinstance(dispatcher, AllToAllDispatcher) for dispatcher in dispatchers):
            yield  # every rank has all experts
            return
        meeting = _Meeting(model, stacks)
        try:
            for number, dispatcher in enumerate(dispatchers, start=1):
                dispatcher.announce = partial(meeting.announce, number)  # type: ignore[attr-defined]
            yield
            meeting.serve()
        finally:
            for dispatcher in dispatchers:
                dispatcher.announce = None  # type: ignore[attr-defined]
