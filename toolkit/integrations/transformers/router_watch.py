"""Routing decisions of a transformers model, for `RouterPenalty`.

Works for any model family: `toolkit.experts.sharding.find` finds experts and routers, and a router returns
(logits, weights, ids).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from toolkit.errors import UserError
from toolkit.experts.compat import without_dynamo
from toolkit.experts.layer.model_inputs import counted_tokens, model_adds_balance_loss, watch_inputs
from toolkit.experts.layer.recompute import in_reentrant_forward, recomputing
from toolkit.experts.layer.router import Routing
from toolkit.experts.layer.routing_log import Choices
from toolkit.experts.sharding.find import routers, rows_of_router


class RouterWatch:
    """Last routing of a router."""

    def __init__(self, name: str, router: nn.Module):
        self.name, self.module = name, router
        self.num_choices = rows_of_router(router) or 0
        """Number of experts."""
        self.is_sigmoid: bool | None = None
        """Whether scores are sigmoids of the logits, not a softmax; None until a forward pass shows it."""
        self.routing: Routing | None = None
        self.last_load_E = torch.zeros(self.num_choices, dtype=torch.int64)
        """int64: tokens per expert on this rank in the last forward pass, in training or not, without padding."""
        self.model_balances = False
        """Whether the last forward pass has the model's own aux loss."""
        router.register_forward_hook(self._record)

    def __getstate__(self) -> dict[str, Any]:
        """Omit the routing in copies of the model: its tensors are in the graph of the last forward."""
        return self.__dict__ | {"routing": None}

    def _record(self, router: nn.Module, args: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:  # noqa: ARG002
        if not isinstance(output, tuple) or len(output) != 3:
            raise UserError(
                f"RouterPenalty: the router {type(router).__name__} of {self.name!r} does not return logits, weights "
                "and expert ids. Use the model's own auxiliary loss."
            )
        if router.training and not torch.is_grad_enabled() and in_reentrant_forward():
            raise UserError(
                "RouterPenalty: reentrant checkpointing gives it a routing without gradients. "
                'Call gradient_checkpointing_enable({"use_reentrant": False}).'
            )
        logits_TE, weights_TK, ids_TK = output
        logits_TE = logits_TE.float() if logits_TE.dtype in (torch.bfloat16, torch.float16) else logits_TE
        if self.is_sigmoid is None:
            self.is_sigmoid = has_sigmoid_scores(logits_TE, weights_TK, ids_TK)
        probs_TE = logits_TE.softmax(-1)
        if self.is_sigmoid:  # scores as the family uses them, made comparable: DeepSeek-V3 (arXiv 2412.19437), eq. 19
            scores_TE = logits_TE.sigmoid()
            probs_TE = scores_TE / scores_TE.sum(-1, keepdim=True)
        if recomputing():  # not earlier: recomputation must save the same tensors as the forward
            return
        counted_T = counted_tokens(len(ids_TK))
        self.routing = Routing(ids_TK, weights_TK, probs_TE, logits_TE, counted_T=counted_T)
        self.last_load_E = Choices(ids_TK, counted_T).load(self.num_choices)
        self.model_balances = model_adds_balance_loss()


@without_dynamo
@torch.no_grad()
def has_sigmoid_scores(logits_TE: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> bool | None:
    """Return whether routing weights come from the sigmoid of the logits, not from a softmax; None if these tokens do
    not show it, as with equal logits. A host sync.

    Weights can be scaled, and normalised over a token's experts, so their ratios within a token are compared, or
    between tokens if each has one expert.
    """
    if weights_TK.shape != ids_TK.shape or not weights_TK.numel():
        return None
    weights = weights_TK.double().clamp(min=1e-30).log()
    logits_TE = logits_TE.double()

    def distance(scores_TE: Tensor) -> Tensor:
        ratios = weights - scores_TE.gather(1, ids_TK)
        return (ratios - ratios.mean(1 if ids_TK.shape[1] > 1 else 0, keepdim=True)).square().mean()

    to_sigmoid, to_softmax = torch.stack(
        [distance(logsigmoid(logits_TE)), distance(logits_TE.log_softmax(-1))]
    ).tolist()
    nearer, farther = sorted((to_sigmoid, to_softmax))
    return to_sigmoid < to_softmax if farther > max(4 * nearer, 1e-12) else None


def watch_routers(model: nn.Module) -> list[RouterWatch]:
    """Watch each router of `model`, in order of layers, for `RouterPenalty`. Call it before wrapping.

    transformers' own `output_router_logits` loss covers only this rank's tokens, and multiplies fractions that were
    averaged over layers first, so an overloaded expert in one layer is offset by an idle expert in another.

    Raises UserError for a model without experts.
    """
    watch_inputs(model)
    watches = [RouterWatch(name, router) for name, router in routers(model).items()]
    if not watches:
        raise UserError(
            f"model: {type(model).__name__} has no experts to balance. Use an MoE model, or leave the penalty out."
        )
    return watches
