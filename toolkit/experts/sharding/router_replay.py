"""Record which experts a model chooses, and replay those choices: `record_routes` and `replay_routes`.

    with record_routes(model) as routes:
        model(**batch)
    with replay_routes(model, routes):                 # or Routes.from_rollout(output.routed_experts, attention_mask)
        model(**batch).loss.backward()

Routers of other libraries are not asked for their kind: while a block runs up to its experts, the call of `torch.topk`
that chooses them returns the given ids, with the scores at these. The router's own code computes the weights.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from toolkit.errors import UserError, require
from toolkit.experts.layer.moe_layer import MoE
from toolkit.experts.layer.recompute import decide, in_region, recomputing, replaying
from toolkit.experts.layer.stack import ExpertStack
from toolkit.experts.routing.routes import RouteHook, Routes, fixed_choice
from toolkit.experts.sharding.find import stacked_experts
from toolkit.experts.sharding.found import FoundExperts, outside_wrappers


@contextmanager
def record_routes(model: nn.Module) -> Iterator[Routes]:
    """Record the experts that each forward pass of `model` chooses, except recomputations in a backward pass.

    Args:
        model: Any model that `shard_experts` accepts, before or after it was sharded or wrapped.

    Yields:
        The routes of this rank's tokens, to which each forward pass is added.

    Raises:
        UserError: The model has no top-k routers.
    """
    hooks = route_hooks(model)
    routes = Routes([[] for _ in hooks])
    for hook, calls in zip(hooks.values(), routes.layers, strict=True):
        hook.records.append(calls)
    try:
        yield routes
    finally:
        for hook, calls in zip(hooks.values(), routes.layers, strict=True):
            hook.records = [each for each in hook.records if each is not calls]


@contextmanager
def replay_routes(model: nn.Module, routes: Routes) -> Iterator[None]:
    """Have the forward passes of `model` use recorded experts, call by call.

    The routers of `model` compute weights from their scores, so they have gradients. Expert load, auxiliary losses and
    placement follow the replayed experts. Activation checkpointing repeats a forward pass with its routes, also after
    the end of this context.

    Args:
        model: As for `record_routes`.
        routes: The experts of this rank's tokens. For tokens without a route the router chooses.

    Raises:
        UserError: The routes have other layers, tokens, experts or numbers of experts per token, or calls are left over
            at the end.
    """
    hooks = route_hooks(model)
    layers = _routes_of(model, list(hooks), routes)
    calls = [[fixed_choice(name, ids_TK) for ids_TK in layer] for name, layer in zip(hooks, layers, strict=True)]
    if dropping := next((n for n in hooks if getattr(model.get_submodule(n), "capacity_factor", None)), None):
        require(not model.training, "capacity_factor", dropping, "may drop other pairs than recorded. Leave it out")
    for hook, of_layer in zip(hooks.values(), calls, strict=True):
        hook.replay(of_layer)
    try:
        yield
        for name, hook in hooks.items():
            if hook.not_replayed:
                raise UserError(
                    f"routes: {len(routes)} calls, but layer {name!r} was called {len(routes) - hook.not_replayed} "
                    "times. Replay the recorded number of forward passes."
                )
    finally:
        for hook in hooks.values():
            hook.replay(None)


def route_hooks(model: nn.Module) -> dict[str, RouteHook]:
    """Return the hook of each layer with experts, by name in order of layers. Hooks are made once, and stay."""
    blocks = hook_blocks(model, stacked_experts(model))
    hooks = {}
    for name, module in model.named_modules():
        if isinstance(module, MoE):
            hooks[name] = _hook_of_moe(name, module)
        elif name in blocks:
            hooks[name] = blocks[name]
    if not hooks:
        raise UserError(f"model: {type(model).__name__} has no routers to record. Use an MoE model.")
    return hooks


def hook_blocks(
    model: nn.Module, experts: Mapping[str, FoundExperts] | Mapping[str, ExpertStack]
) -> dict[str, RouteHook]:
    """Return the `route_hooks` of layers other than `MoE`. With them, activation checkpointing routes once.

    Args:
        model: The model.
        experts: Its experts, by the names of their modules.
    """
    modules = {name: model.get_submodule(name) for name in experts}
    return {
        name: _hook_of_block(name, module, experts[name].num_experts, model)
        for name, module in modules.items()
        if not isinstance(module, MoE)
    }


def _hook_of_moe(name: str, layer: MoE) -> RouteHook:
    router = layer.router
    if not router.experts_are_fixed:
        raise UserError(f"model: routes of {type(router).__name__} at {name!r} cannot be replayed. Use a top-k router.")
    if not isinstance(router.route_hook, RouteHook):
        router.route_hook = RouteHook(name)
    return router.route_hook


def _hook_of_block(name: str, experts: Any, num_experts: int, model: nn.Module) -> RouteHook:
    made: RouteHook | None = getattr(experts, "route_hook", None)
    if made is None:
        block = _block_of(outside_wrappers(name), model)
        made = experts.route_hook = _BlockWatch(name, block, experts, num_experts).hook
    return made


def _block_of(experts: str, model: nn.Module) -> nn.Module:
    """Return the module that holds the experts of this name and their router."""
    name = experts.rpartition(".")[0]
    while name and len(list(model.get_submodule(name).children())) == 1:  # DBRX's tables are further inside
        name = name.rpartition(".")[0]
    return model.get_submodule(name)


def _routes_of(model: nn.Module, names: list[str], routes: Routes) -> list[list[Tensor]]:
    """Return the layers of `routes` for the layers `names`: all, or a selection by number from all hidden layers."""
    if len(routes.layers) == len(names):
        return routes.layers
    numbers = [int(found[1]) if (found := re.search(r"\.(\d+)(\.|$)", f".{name}")) else -1 for name in names]
    config: Any = getattr(getattr(model, "module", model), "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    hidden = getattr(config, "num_hidden_layers", None)
    if hidden != len(routes.layers) or len(set(numbers)) < len(names) or not all(0 <= n < hidden for n in numbers):
        raise UserError(
            f"routes: {len(routes.layers)} layers, but {len(names)} layers of the model have experts"
            f"{f', out of {hidden}' if hidden else ''}. Use routes of the same model."
        )
    return [routes.layers[number] for number in numbers]


# --- blocks of other libraries ---------------------------------------------------------------------------------------


class _BlockWatch:
    """Records and replays the choices of a block, from its beginning to the call of its experts."""

    def __init__(self, name: str, block: nn.Module, experts: nn.Module, num_experts: int):
        self.hook, self.num_experts = RouteHook(name), num_experts
        self._call: _Call | None = None
        block.register_forward_pre_hook(self._begin, with_kwargs=True, prepend=True)
        block.register_forward_hook(self._end_block, always_call=True)
        experts.register_forward_pre_hook(self._end_choice, with_kwargs=True)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_call": None}

    def _begin(self, _block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if not self._takes_part():
            self.hook.pass_by()
            return
        hidden = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        tokens = hidden.numel() // hidden.shape[-1]
        if tokens:
            self._call = _Call(self.hook, self.num_experts, tokens)
            self._call.__enter__()

    def _takes_part(self) -> bool:
        if recomputing() and not replaying():
            return self.hook.repeats()
        return self.hook.is_active or in_region()

    def _end_choice(self, _experts: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """End the choice before the experts are called: their arguments show whether `topk` chose them."""
        call, self._call = self._call, None
        if call is not None:
            call.__exit__(None, None, None)
            integers = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor) and not v.is_floating_point()]
            call.finish(integers[0] if integers else None)

    def _end_block(self, _block: nn.Module, _args: Any, output: Any) -> None:
        call, self._call = self._call, None
        if call is not None:
            call.__exit__(None, None, None)
            if output is not None:  # else an error is on its way
                call.finish(None)


class _Call(TorchFunctionMode):
    """One forward pass of a block, with the results of its router's `topk`."""

    def __init__(self, hook: RouteHook, experts: int, tokens: int):
        super().__init__()
        self.hook, self.tokens = hook, tokens
        self.sizes = (experts, experts + 1)
        """How many scores a router may choose by; ZAYA's has one for no expert."""
        self.fixed = hook.begin(tokens)
        self.chosen_TK: Tensor | None = None
        self.top_k: int | None = None
        """K of the last `topk` that could have been the choice."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in (torch.topk, Tensor.topk):
            return func(*args, **kwargs)
        return self._topk(*args, **kwargs)

    def _topk(
        self, input: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True, **out: Any
    ) -> torch.return_types.topk:
        scores, size = input, input.shape[-1]
        over_experts = dim in (-1, scores.ndim - 1) and largest and size in self.sizes and not out
        if not over_experts or scores.numel() != self.tokens * size:
            return torch.topk(scores, k, dim, largest, sorted, **out)
        self.top_k = k
        # With groups there can be several calls: the last is the choice, and the routes of the others are unused.
        if self.fixed is not None and self.fixed.ids_TK.shape[1] != k:
            return torch.topk(scores, k, dim, largest, sorted)
        if self.fixed is not None:
            self.hook.check(self.fixed, k, size)

        def own() -> Tensor:
            return torch.topk(scores.detach(), k, sorted=sorted).indices.view(-1, k)

        # Outside of autograd, and `gather` in each case: a recomputation must save the same tensors.
        self.chosen_TK = decide(lambda: own() if self.fixed is None else self.fixed.fill(own, scores.device))
        ids = self.chosen_TK.view(*scores.shape[:-1], k)
        return torch.return_types.topk((scores.gather(-1, ids), ids))

    def finish(self, ids: Tensor | None) -> None:
        """Check and record the choice, given the `ids` that the experts are called with."""
        chosen_TK, fixed = self.chosen_TK, self.fixed
        is_replayed = chosen_TK is not None
        if chosen_TK is None and fixed is not None and self.top_k is not None:
            self.hook.check(fixed, self.top_k, max(self.sizes))
        if chosen_TK is None and ids is not None and ids.ndim == 2 and len(ids) == self.tokens:
            chosen_TK = ids  # from a table, as in DeepSeek-V4's first layers
            if fixed is not None:
                self.hook.check(fixed, ids.shape[1], max(self.sizes))
                is_replayed = torch.equal(fixed.fill(lambda: ids, ids.device), ids)
        if (chosen_TK is None and self.hook.is_active) or (fixed is not None and not is_replayed):
            raise UserError(
                f"model: the router of layer {self.hook.layer!r} does not choose by torch.topk among {self.sizes[0]} "
                "experts, so its choices cannot be recorded or replayed. Use a model with a top-k router."
            )
        if chosen_TK is not None:
            self.hook.end(chosen_TK)
