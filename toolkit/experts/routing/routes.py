"""Routes: the experts of each token, recorded in one forward pass and replayed in another.

In reinforcement learning, the inference server and the trained model choose different experts for some tokens because
of different kernels or newer weights. Only the choice is replayed; routing weights are computed from the trained
router's scores, so the router gets gradients (R3: Ma et al. 2025, arXiv 2510.11370).

`toolkit.experts.layer.router` calls the `RouteHook` of an `MoE` layer. The hooks of transformers models are in
`toolkit.experts.sharding.router_replay`, which has `record_routes` and `replay_routes`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from toolkit.errors import UserError
from toolkit.experts.layer.recompute import in_reentrant_forward, recomputing, replaying

if TYPE_CHECKING:
    from jaxtyping import Int

NO_ROUTE = -1
"""Id in all K places of a token without recorded experts; its router chooses."""


@dataclass(eq=False)
class Routes:
    """The experts of each token, by layer and call of the model: (tokens, experts per token) integers per call."""

    layers: list[list[Tensor]] = field(default_factory=list)
    """`layers[l][c]`: integers (T, K), logical expert ids of the T tokens of call c, in the order of the router's
    weights; -1 in all K places of a token without a route. A call on sequences (B, S) has T = B * S tokens."""

    def __len__(self) -> int:
        """Return the calls of the model."""
        return max(map(len, self.layers), default=0)

    def __getitem__(self, call: int) -> Routes:
        """Return the routes of one call, for micro-batches that are replayed in another order."""
        return Routes([[calls[call]] for calls in self.layers])

    def __add__(self, later: Routes) -> Routes:
        """Return the calls of both, in order: micro-batches of one step. Raises ValueError if their layers differ."""
        return Routes([first + second for first, second in zip(self.layers, later.layers, strict=True)])

    @classmethod
    def from_rollout(cls, routed_experts: Sequence[ArrayLike], attention_mask: ArrayLike) -> Routes:
        """Return the routes of one call on B sequences, from the arrays that vLLM and SGLang return per sequence.

        An array has a row for each token, optionally without the last token, which a server does not feed to the model.
        That token, padding, and rows of -1 (the largest value in unsigned arrays) have no route.

        Args:
            routed_experts: B integer arrays (length, layers, K), with only the MoE layers or all hidden layers; the
                rows of a dense layer are ignored.
            attention_mask: (B, S), nonzero at the tokens of each sequence, padded at either side.

        Raises:
            UserError: The number of rows of an array does not match the number of tokens.
            ValueError: The number of arrays is not the number of sequences.
            TypeError: An array is not of integers.
        """
        mask_BS = torch.as_tensor(np.asarray(attention_mask)).bool()
        arrays = [_signed(np.asarray(array)) for array in routed_experts]
        ids_BSLK = torch.full((*mask_BS.shape, *arrays[0].shape[1:]), NO_ROUTE, dtype=torch.int64)
        for index, (array, mask_S) in enumerate(zip(arrays, mask_BS, strict=True)):
            tokens = int(mask_S.sum())
            if not tokens - 1 <= len(array) <= tokens:
                raise UserError(
                    f"routed_experts[{index}]: {len(array)} rows for {tokens} tokens. Give that number, or "
                    "one less, padded with rows of -1."
                )
            ids_BSLK[index, mask_S.nonzero().flatten()[: len(array)]] = array
        return cls([[layer_TK] for layer_TK in ids_BSLK.flatten(0, 1).unbind(1)])

    def to_rollout(self, attention_mask: ArrayLike) -> list[NDArray[np.int32]]:
        """Return for each sequence an array (length, layers, K), as `from_rollout` reads it.

        Tokens of several calls on the same B sequences, as in generation, are joined; the last one, which was not fed,
        may be missing.

        Args:
            attention_mask: (B, S), nonzero at the tokens of each sequence.
        """
        mask_BS = torch.as_tensor(np.asarray(attention_mask)).bool()
        sequences = len(mask_BS)
        layers = []
        for calls in self.layers:
            layers.append(torch.cat([ids_TK.cpu().unflatten(0, (sequences, -1)) for ids_TK in calls], dim=1))
        ids_BSLK = torch.stack(layers, dim=2).to(torch.int32)
        return [ids_SLK[mask_S[: len(ids_SLK)]].numpy() for ids_SLK, mask_S in zip(ids_BSLK, mask_BS, strict=True)]

    def flipped(self, other: Routes) -> float:
        """Return the fraction of (token, expert) pairs whose expert is not among the token's experts in `other`.

        Tokens without a route are ignored.
        """
        mine, its = ([ids_TK for calls in routes.layers for ids_TK in calls] for routes in (self, other))
        kept = compared = 0
        for ids_TK, other_TK in zip(mine, its, strict=True):
            other_TK = other_TK.to(ids_TK.device)
            known_TK = (ids_TK != NO_ROUTE) & (other_TK != NO_ROUTE)
            among_TK = (ids_TK.unsqueeze(2) == other_TK.unsqueeze(1)).any(2)
            kept += int((among_TK & known_TK).sum())
            compared += int(known_TK.sum())
        return 1 - kept / compared if compared else 0.0


def _signed(array: NDArray[Any]) -> Int[Tensor, "S L K"]:
    """int64, -1 in rows that are filled with the largest value of an unsigned type."""
    ids_SLK = array.astype(np.int64, casting="same_kind")
    if array.dtype.kind == "u":
        ids_SLK[(array == np.iinfo(array.dtype).max).all(-1)] = NO_ROUTE
    return torch.from_numpy(ids_SLK)


class FixedChoice(NamedTuple):
    """Fixed experts of one call."""

    ids_TK: Int[Tensor, "T K"]
    """int64; -1 for tokens that the router routes."""
    largest: int
    complete: bool
    """Whether every token has a route; known on the host, so the forward pass needs no host sync."""

    def fill(self, choose: Callable[[], Int[Tensor, "T K"]], device: torch.device) -> Int[Tensor, "T K"]:
        """Return int64 (T, K), the given experts, with missing routes filled by `choose`."""
        ids_TK = self.ids_TK.to(device)
        return ids_TK if self.complete else torch.where(ids_TK == NO_ROUTE, choose(), ids_TK)


def fixed_choice(layer: str, ids_TK: Tensor) -> FixedChoice:
    """Return `ids_TK` of the layer so named, checked. Raises UserError for tokens with a part of a route, or with an
    expert twice."""
    ids_TK = ids_TK.detach().to(torch.int64)
    missing_TK = ids_TK < 0
    sorted_TK = ids_TK.sort(-1).values
    twice_T = ((sorted_TK[:, 1:] == sorted_TK[:, :-1]) & (sorted_TK[:, 1:] >= 0)).any(-1)
    for wrong_T, fault in (
        (missing_TK.any(-1) & ~missing_TK.all(-1), "have experts in a part of their places"),
        (twice_T, "have an expert twice, as in rows that a server left at 0"),
    ):
        if wrong_T.any():
            first = int(wrong_T.nonzero()[0])
            raise UserError(
                f"routes of layer {layer!r}: {int(wrong_T.sum())} tokens {fault} (token {first}: "
                f"{ids_TK[first].tolist()}). Use -1 for tokens without a route."
            )
    largest = int(ids_TK.max()) if ids_TK.numel() else NO_ROUTE
    return FixedChoice(ids_TK.masked_fill(missing_TK, NO_ROUTE), largest, not bool(missing_TK.any()))


class RouteHook:
    """Hook that records or replays the expert choices of one layer.

    A call of the layer is `begin`, then the given experts or the router's own choice, then `end`. Recomputation by
    activation checkpointing reuses the choices of the original forward pass, even after `record_routes` and
    `replay_routes` have ended, and neither counts nor consumes routes. Plain checkpointing supports one forward pass at
    a time; `toolkit.experts.layer.recompute.replay_contexts` supports several.
    """

    def __init__(self, layer: str):
        self.layer = layer
        self.records: list[list[Tensor]] = []
        """Lists that get the ids of each call."""
        self._replayed: list[FixedChoice] | None = None
        self._next = 0
        self._recent: list[FixedChoice | None] = []
        """Choices of at most two last forward passes that can be recomputed; None if the router chose."""
        self._repeated = False

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies of the model, which record and replay nothing."""
        return type(self)(self.layer).__dict__

    @property
    def is_active(self) -> bool:
        """Whether calls are recorded or replayed."""
        return bool(self.records) or self._replayed is not None

    def repeats(self) -> bool:
        """Return whether this is the recomputation of a call that was recorded or replayed."""
        return any(call is not None for call in self._recent) and recomputing()

    def replay(self, calls: list[FixedChoice] | None) -> None:
        """Replay `calls` in the next forward passes, one in each. None stops replaying."""
        if calls is not None and self._replayed is not None:
            raise UserError("replay_routes: another one is active on this model. End it first.")
        self._replayed, self._next = calls, 0

    @property
    def not_replayed(self) -> int:
        """Number of calls whose routes were not used."""
        return len(self._replayed or []) - self._next

    def choose(
        self, own: Callable[[], Int[Tensor, "T K"]], *, tokens: int, top_k: int, choices: int, device: torch.device
    ) -> Int[Tensor, "T K"]:
        """Return the replayed experts, or `own()` for tokens without a route, and record them."""
        if not tokens:
            return own()
        fixed = self.begin(tokens)
        if fixed is not None:
            self.check(fixed, top_k, choices)
        ids_TK = own() if fixed is None else fixed.fill(own, device)
        self.end(ids_TK)
        return ids_TK

    def begin(self, tokens: int) -> FixedChoice | None:
        """Return the experts given to this call, or None. Raises UserError if the recorded calls do not match."""
        if recomputing():
            return None if replaying() else self._of_first_run()
        if self._replayed is None:
            return None
        recorded = [len(call.ids_TK) for call in self._replayed]
        if recorded[self._next : self._next + 1] != [tokens]:
            raise UserError(
                f"routes: call {self._next + 1} of layer {self.layer!r} has {tokens} tokens, but the recorded calls "
                f"have {recorded}. Replay the recorded batches in their order."
            )
        self._next += 1
        return self._replayed[self._next - 1]

    def check(self, fixed: FixedChoice, top_k: int, choices: int) -> None:
        """Raise UserError if the router takes other numbers of experts than `fixed` has."""
        recorded_k = fixed.ids_TK.shape[1]
        if recorded_k != top_k or fixed.largest >= choices:
            raise UserError(
                f"routes: {recorded_k} experts per token, up to expert {fixed.largest}, but layer {self.layer!r} takes "
                f"{top_k} of {choices}. Use routes of the same model."
            )

    def end(self, ids_TK: Int[Tensor, "T K"]) -> None:
        """Record the experts that this call used."""
        if recomputing():
            return
        for record in self.records:
            record.append(ids_TK.detach())
        self._note(FixedChoice(ids_TK.detach(), NO_ROUTE, True) if self.is_active else None)

    def pass_by(self) -> None:
        """Called instead of `begin` and `end` if nothing is recorded or replayed."""
        if recomputing():
            self._repeated = True
        else:
            self._note(None)

    def _note(self, call: FixedChoice | None) -> None:
        """Keep the choices of a call that can be recomputed; None: a call whose router chose."""
        if call is None and not self._recent:
            return
        if torch.is_grad_enabled() or in_reentrant_forward():
            self._recent = [*([] if self._repeated else self._recent[-1:]), call]
            self._repeated = False

    def _of_first_run(self) -> FixedChoice | None:
        if len(self._recent) > 1 and any(call is not None for call in self._recent):
            raise UserError(
                f"layer {self.layer!r}: the backward pass recomputes one of several forward passes, and plain "
                "checkpointing does not say which. Call backward after each forward pass, or "
                'pass "context_fn": layer.recompute.replay_contexts to gradient_checkpointing_enable.'
            )
        self._repeated = True
        return self._recent[-1] if self._recent else None
