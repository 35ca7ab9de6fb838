"""Upcycling: an MoE model made from a trained dense model (Komatsuzaki et al. 2022, arXiv 2212.05055).

`shards=1` copies the dense feed-forward network to every expert. `shards=n` splits its hidden width into n parts and
assigns them to the experts in turn; router rows start equal within a set of n experts, so a token chooses full sets
("virtual groups", He et al. 2024, arXiv 2410.07524). In both cases the weights of a token's experts add up to 1, so the
output equals the dense model's up to rounding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from toolkit.errors import UserError
from toolkit.experts.parallel.seeding import generator
from toolkit.experts.sharding.find import experts_modules, routers
from toolkit.integrations.transformers.language_models import causal_lm

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# fmt: off
SHARED_FIELDS = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps", "use_cache", "pad_token_id",
    "bos_token_id", "eos_token_id", "tie_word_embeddings", "rope_parameters", "sliding_window", "attention_dropout",
    "attention_bias",
)
# fmt: on


def upcycle(
    dense: PreTrainedModel,
    *,
    num_experts: int,
    top_k: int,
    shards: int = 1,
    redraw: float = 0.0,
    seed: int = 0,
) -> PreTrainedModel:
    """Return an MoE model with the output of a dense one: Mixtral from Llama and Mistral, Qwen3-MoE from Qwen3.

    Args:
        dense: The trained model.
        num_experts: Experts per layer.
        top_k: Experts per token.
        shards: Parts of the dense hidden width, one for each expert in turn.
        redraw: Fraction of each expert's hidden units drawn again with the same mean and spread, so that experts differ
            (Drop-Upcycling, Nakamura et al. 2025, arXiv 2502.19261). The first loss differs then.
        seed: Seed of router rows and redrawn units.

    Raises:
        UserError: The model is of another family, has biases, or `shards` does not divide the numbers.

    Example:
        >>> sparse = upcycle(causal_lm("my-qwen3"), num_experts=64, top_k=8, shards=8)
    """
    hidden = int(dense.config.intermediate_size)
    if shards < 1 or hidden % shards or num_experts % shards or top_k % shards:
        raise UserError(
            f"shards: {shards} does not divide the hidden width {hidden}, num_experts={num_experts} and top_k={top_k}. "
            "Choose numbers that it divides."
        )
    config = _mixture_config(dense.config, num_experts, top_k, hidden // shards)
    sparse = causal_lm(config, dtype=dense.dtype)
    state = dense.state_dict()
    missing, unexpected = sparse.load_state_dict(
        {name: value for name, value in state.items() if ".mlp." not in name}, strict=False
    )
    biases = (name for name in state if ".mlp." in name and name.endswith("bias"))
    strange = [*unexpected, *biases, *(name for name in missing if ".mlp." not in name)]
    if strange:
        raise UserError(
            f"dense: {type(sparse).__name__} has no place for parameters such as {strange[0]!r}. Use a plain model of "
            "its kind, without biases."
        )
    gates = routers(sparse)
    for name, experts in experts_modules(sparse).items():
        feed_forward = dense.get_submodule(name.rpartition(".")[0])
        _fill_experts(experts, feed_forward, shards, redraw, seed, name)
        sets = num_experts // shards
        rows = torch.randn(sets, config.hidden_size, generator=generator(seed, "router", name))
        weight = gates[name].weight
        assert isinstance(weight, Tensor)
        weight.data.copy_((rows * config.initializer_range).repeat_interleave(shards, dim=0))
    return sparse


def _mixture_config(dense: PreTrainedConfig, num_experts: int, top_k: int, width: int) -> Any:
    from transformers import MixtralConfig, Qwen3MoeConfig

    kind = dense.model_type
    if kind not in ("llama", "mistral", "qwen3"):
        raise UserError(f"dense: a model of type {kind!r} cannot be upcycled. Use llama, mistral or qwen3.")
    fields = {name: getattr(dense, name) for name in SHARED_FIELDS if hasattr(dense, name)}
    if kind != "qwen3":
        fields.pop("attention_bias", None)
        return MixtralConfig(
            **fields, intermediate_size=width, num_local_experts=num_experts, num_experts_per_tok=top_k
        )
    return Qwen3MoeConfig(
        **fields,
        intermediate_size=dense.intermediate_size,
        moe_intermediate_size=width,
        num_experts=num_experts,
        num_experts_per_tok=top_k,
        norm_topk_prob=True,
        use_sliding_window=dense.use_sliding_window,
    )


@torch.no_grad()
def _fill_experts(
    experts: nn.Module, feed_forward: nn.Module, shards: int, redraw: float, seed: int, name: str
) -> None:
    """Give expert e part e % shards of the hidden units, with its output scaled by `shards`, because it has only
    1 / shards of its set's weight."""
    gate_FD, up_FD, down_DF = (feed_forward.get_parameter(f"{n}_proj.weight") for n in ("gate", "up", "down"))
    gate_up_EHD, down_EDF = experts.get_parameter("gate_up_proj"), experts.get_parameter("down_proj")
    width = down_EDF.shape[2]
    for expert in range(len(down_EDF)):
        part = slice((expert % shards) * width, (expert % shards + 1) * width)
        gate, up, down = gate_FD[part].clone(), up_FD[part].clone(), down_DF[:, part].T * shards
        draws = generator(seed, "redraw", name, expert)
        units = torch.randperm(width, generator=draws)[: round(redraw * width)]
        for matrix in (gate, up, down):  # one hidden unit per row
            noise = torch.randn(len(units), matrix.shape[1], generator=draws).to(matrix)
            matrix[units] = matrix.mean() + matrix.std() * noise
        gate_up_EHD[expert] = torch.cat([gate, up])
        down_EDF[expert] = down.T
