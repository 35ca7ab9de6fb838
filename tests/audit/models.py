"""Small checkpoints of four families, with experts in the layout of each family."""

from __future__ import annotations

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


def build(family: str) -> State:
    draw = torch.Generator().manual_seed(0)

    def tensor(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    state = {"model.embed_tokens.weight": tensor(16, HIDDEN), "model.norm.weight": torch.ones(HIDDEN)}
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        state[f"{at}.self_attn.q_proj.weight"] = tensor(HIDDEN, HIDDEN)
        if family == "gpt_oss":
            state[f"{at}.mlp.router.weight"] = tensor(EXPERTS, HIDDEN)
            state[f"{at}.mlp.experts.gate_up_proj"] = tensor(EXPERTS, HIDDEN, 2 * WIDTH)
            state[f"{at}.mlp.experts.gate_up_proj_bias"] = torch.zeros(EXPERTS, 2 * WIDTH)
            state[f"{at}.mlp.experts.down_proj"] = tensor(EXPERTS, WIDTH, HIDDEN)
        elif family == "granitemoe":
            state[f"{at}.block_sparse_moe.router.layer.weight"] = tensor(EXPERTS, HIDDEN)
            state[f"{at}.block_sparse_moe.input_linear.weight"] = tensor(EXPERTS, 2 * WIDTH, HIDDEN)
            state[f"{at}.block_sparse_moe.output_linear.weight"] = tensor(EXPERTS, HIDDEN, WIDTH)
        else:
            moe, names = (
                ("block_sparse_moe", "w1 w3 w2") if family == "mixtral" else ("mlp", "gate_proj up_proj down_proj")
            )
            state[f"{at}.{moe}.gate.weight"] = tensor(EXPERTS, HIDDEN)
            for expert in range(EXPERTS):
                for name in names.split():
                    shape = (HIDDEN, WIDTH) if name in ("w2", "down_proj") else (WIDTH, HIDDEN)
                    state[f"{at}.{moe}.experts.{expert}.{name}.weight"] = tensor(*shape)
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
