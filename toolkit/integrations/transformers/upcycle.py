"""A mixture of experts from a trained dense model, whose output it has at first (Komatsuzaki et al. 2022,
arXiv 2212.05055).

`shards=1` copies the dense feed-forward to every expert. `shards=G` splits its hidden width into G parts and assigns
them to the experts in turn; router rows start equal within a set of G, so a token chooses whole sets ("virtual
groups", He et al. 2024, arXiv 2410.07524). Either way the weights of a token's experts add up to 1, so the mixture's
output is the dense one's: bit for bit or up to rounding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from toolkit.errors import UserError
from toolkit.experts.parallel.seeding import generator
from toolkit.experts.sharding.experts_modules import experts_modules, routers
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
    """Llama and Mistral become Mixtral, Qwen3 becomes Qwen3-MoE; `top_k` counts experts of the finished mixture.

    `redraw`: the fraction of each expert's hidden units drawn anew with the mean and spread of the old ones, so that
    experts differ (Drop-Upcycling, Nakamura et al. 2025, arXiv 2502.19261); the first loss is then another.

    Raises UserError where the model is of another family, or the numbers do not fit.
    """
    hidden = int(dense.config.intermediate_size)
    if shards < 1 or hidden % shards or num_experts % shards or top_k % shards:
        raise UserError(
            f"shards={shards} must divide the dense hidden width {hidden}, num_experts={num_experts} and "
            f"top_k={top_k}: choose numbers that it divides."
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
            f"model {type(dense).__name__} has parameters that {type(sparse).__name__} does not share, such as "
            f"{strange[0]!r}: use a model of its plain kind, without biases."
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
        raise UserError(f"a dense model of type {kind!r} cannot be upcycled: use llama, mistral or qwen3.")
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
    """Expert e gets part e % shards of the hidden units; its output is scaled by `shards`, because each of a set's
    members carries only that share of the set's weight."""
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
