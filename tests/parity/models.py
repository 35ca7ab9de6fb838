"""Small causal language models with MoE layers, by name. Each maps token ids (B, L) to `{"logits": (B, L, VOCAB)}`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.support import families
from toolkit.experts.layer.moe_layer import make_moe
from toolkit.experts.layer.router_options import RouterOptions
from toolkit.train.models.mlp import MLP

VOCAB, LENGTH, DIM, EXPERTS, TOP_K = families.VOCAB, 6, 8, 8, 2


class StackedExperts(nn.Module):
    """Experts as a user may write them: stacked parameters, biases included, and a loop."""

    def __init__(self, experts: int = EXPERTS, dim: int = DIM) -> None:
        super().__init__()
        self.num_experts = experts
        self.up = nn.Parameter(torch.randn(experts, dim, 13) * 0.3)
        self.up_bias = nn.Parameter(torch.randn(experts, 13) * 0.1)
        self.down = nn.Parameter(torch.randn(experts, 13, dim) * 0.3)

    def forward(self, hidden: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden)
        for expert in range(self.num_experts):
            token, choice = (expert_ids == expert).nonzero(as_tuple=True)
            y = self.compute(expert, hidden[token], weights[token, choice, None])
            out = out.index_add(0, token, y.to(out.dtype))
        return out

    def compute(self, expert: int, x: Tensor, weight: Tensor) -> Tensor:
        return (x @ self.up[expert] + self.up_bias[expert]).relu() @ self.down[expert] * weight


class RoutedExperts(nn.Module):
    """A gate and stacked experts."""

    def __init__(self, experts: int = EXPERTS, dim: int = DIM) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(dim, experts, bias=False), StackedExperts(experts, dim)

    def forward(self, x: Tensor) -> Tensor:
        h = x.flatten(0, -2)
        weights, ids = self.gate(h).softmax(-1).topk(TOP_K)
        return self.experts(h, ids, weights).view(x.shape)


class Block(nn.Module):
    def __init__(self, moe: nn.Module) -> None:
        super().__init__()
        self.norm, self.moe = nn.LayerNorm(DIM), moe

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(self.norm(x))


class MoELanguageModel(nn.Module):
    """An embedding, MoE blocks and an output layer. Each token sees its predecessor instead of attending."""

    _no_split_modules = ("Block",)

    def __init__(self, *moe_layers: nn.Module, calls: int = 1, tied: bool = False) -> None:
        super().__init__()
        self.calls = calls
        """How often each block is called."""
        self.use_reentrant: bool | None = None
        """The kind of activation checkpointing of the blocks; None computes without."""
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(map(Block, moe_layers))
        self.head = nn.Linear(DIM, VOCAB, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, bool]) -> None:
        self.use_reentrant = gradient_checkpointing_kwargs["use_reentrant"]

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        x = self.embed(input_ids)
        x = (x + 0.5 * nn.functional.pad(x, (0, 0, 1, -1))).tanh()
        for block in self.blocks:
            for _ in range(self.calls):
                x = block(x) if self.use_reentrant is None else checkpoint(block, x, use_reentrant=self.use_reentrant)
        return {"logits": self.head(x)}


class TwoModels(nn.Module):
    """Two language models whose logits are added, with unequal numbers of experts."""

    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.first = MoELanguageModel(RoutedExperts())
        self.second = MoELanguageModel(make_moe(DIM, 12, EXPERTS // 2, TOP_K))

    def gradient_checkpointing_enable(self, **kwargs: Any) -> None:
        self.first.gradient_checkpointing_enable(**kwargs)
        self.second.gradient_checkpointing_enable(**kwargs)

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        return {"logits": self.first(input_ids)["logits"] + self.second(input_ids)["logits"]}


def ours(**options: Any) -> nn.Module:
    return MoELanguageModel(*(make_moe(DIM, 12, EXPERTS, TOP_K, seed=seed, **options) for seed in range(2)))


def ours_with_shared_expert() -> nn.Module:
    router = RouterOptions(balance="bias", router_score="sigmoid", routed_scaling=2.5)
    options: dict[str, Any] = {"activation": "swiglu", "router": router}
    layers = [
        make_moe(DIM, 12, EXPERTS, 3, shared_expert=MLP(DIM, 8, DIM), recompute=recompute, **options)
        for recompute in ("full", "selective")
    ]
    return MoELanguageModel(*layers)


def top_1_with_capacity() -> nn.Module:
    options: dict[str, Any] = {"capacity_factor": 1.25, "router": RouterOptions(router_normalize=False)}
    return MoELanguageModel(*(make_moe(DIM, 12, EXPERTS, 1, seed=seed, **options) for seed in range(2)))


def transformers_model(family: str) -> nn.Module:
    from transformers import AutoModelForCausalLM

    config = families.config(family)
    return families.randomize_routers(
        AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "our MoE": ours,
    "shared expert": ours_with_shared_expert,
    "Qwen3-MoE": partial(transformers_model, "qwen3_moe"),
    "DeepSeek-V3": partial(transformers_model, "deepseek_v3"),
    "top-1, capacity": top_1_with_capacity,
    "own experts": lambda: MoELanguageModel(RoutedExperts(), RoutedExperts()),
    "tied weights": lambda: MoELanguageModel(RoutedExperts(), ours().blocks[0].moe, tied=True),
    "one layer, 3 calls": lambda: MoELanguageModel(RoutedExperts(), calls=3),
    "two models": TwoModels,
}
OF_TRANSFORMERS = {"Qwen3-MoE": "qwen3_moe", "DeepSeek-V3": "deepseek_v3"}

WITH_MOE_LAYERS = {"our MoE", "shared expert", "top-1, capacity", "tied weights", "two models"}
"""Models with layers of `make_moe`."""


def build(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().to(dtype)


class Float64:
    """`torch`, except that float32 is float64."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def in_float64_throughout(name: str) -> AbstractContextManager[Any]:
    """Compute in float64 although the code of a transformers family names float32, as in norms and routers."""
    if name not in OF_TRANSFORMERS:
        return nullcontext()
    import importlib

    family = OF_TRANSFORMERS[name]
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    return mock.patch.object(module, "torch", Float64())
