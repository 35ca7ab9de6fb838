"""Small checkpoints of four families, with experts in the layout of each family."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

EXPERTS, HIDDEN, WIDTH, LAYERS = 8, 12, 6, 2
State = dict[str, Tensor]

CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral": {"model_type": "mixtral", "num_local_experts": EXPERTS},
    "qwen3_moe": {"model_type": "qwen3_moe", "num_experts": EXPERTS},
    "gpt_oss": {"model_type": "gpt_oss", "num_local_experts": EXPERTS},
    "granitemoe": {"model_type": "granitemoe", "num_local_experts": EXPERTS, "tie_word_embeddings": True},
}


MLP = {"gate_proj": (WIDTH, HIDDEN), "up_proj": (WIDTH, HIDDEN), "down_proj": (HIDDEN, WIDTH)}
SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "mixtral": {"block_sparse_moe.gate.weight": (EXPERTS, HIDDEN)},
    "qwen3_moe": {"mlp.gate.weight": (EXPERTS, HIDDEN)},
    "gpt_oss": {
        "mlp.router.weight": (EXPERTS, HIDDEN),
        "mlp.experts.gate_up_proj": (EXPERTS, HIDDEN, 2 * WIDTH),
        "mlp.experts.gate_up_proj_bias": (EXPERTS, 2 * WIDTH),
        "mlp.experts.down_proj": (EXPERTS, WIDTH, HIDDEN),
    },
    "granitemoe": {
        "block_sparse_moe.router.layer.weight": (EXPERTS, HIDDEN),
        "block_sparse_moe.input_linear.weight": (EXPERTS, 2 * WIDTH, HIDDEN),
        "block_sparse_moe.output_linear.weight": (EXPERTS, HIDDEN, WIDTH),
    },
}
for expert in range(EXPERTS):
    for name, old_name in zip(MLP, ("w1", "w3", "w2"), strict=True):
        SHAPES["qwen3_moe"][f"mlp.experts.{expert}.{name}.weight"] = MLP[name]
        SHAPES["mixtral"][f"block_sparse_moe.experts.{expert}.{old_name}.weight"] = MLP[name]


def build(family: str) -> State:
    draw = torch.Generator().manual_seed(0)
    state = {"model.embed_tokens.weight": torch.randn(16, HIDDEN, generator=draw)}
    state |= {"model.norm.weight": torch.ones(HIDDEN), "lm_head.weight": state["model.embed_tokens.weight"].clone()}
    for layer in range(LAYERS):
        for name, shape in ({"self_attn.q_proj.weight": (HIDDEN, HIDDEN)} | SHAPES[family]).items():
            value = torch.zeros(shape) if name.endswith("bias") else torch.randn(shape, generator=draw)
            state[f"model.layers.{layer}.{name}"] = value
    return state


def write(folder: Path, family: str, state: State, shards: int = 3, **config: Any) -> Path:
    """Write `state` to `shards` files with an index, and the configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    weight_map = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: state[name].contiguous() for name in list(state)[number::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(CONFIGS[family] | config))
    return folder


def experts_of(state: State, layer: int = 0) -> dict[str, Callable[[int], Tensor]]:
    """Return, by matrix of a layer, a function from expert to a view of its values."""
    at = f"model.layers.{layer}."
    views: dict[str, Callable[[int], Tensor]] = {}
    for name, value in state.items():
        if not name.startswith(at) or not ("expert" in name or "_linear" in name):
            continue
        if ".experts.0." in name:
            head, tail = name.split(".experts.0.")
            views[tail] = lambda expert, head=head, tail=tail: state[f"{head}.experts.{expert}.{tail}"]  # type: ignore[misc]
        elif ".experts." not in name or not name.split(".experts.")[1][0].isdigit():
            views[name.removeprefix(at)] = lambda expert, value=value: value[expert]  # type: ignore[misc]
    return views


def copy_experts(state: State, layer: int, source_of: dict[int, int]) -> State:
    """Overwrite each expert in `source_of` with the old values of its source."""
    for matrix in experts_of(state, layer).values():
        old = {source: matrix(source).clone() for source in source_of.values()}
        for expert, source in source_of.items():
            matrix(expert).copy_(old[source])
    return state
