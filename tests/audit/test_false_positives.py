"""Healthy checkpoints that resemble broken ones have no finding."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.audit.models import CONFIGS, EXPERTS, State, build, copy_experts, write
from tests.audit.test_checks import families, tile
from toolkit.audit.checks import audit

Variant = Callable[[State, str], dict[str, Any] | None]
"""Edits the state of a family; returns fields of its configuration."""


@families
def test_audit_of_healthy_model_finds_nothing(tmp_path: Path, family: str):
    found = audit(write(tmp_path / "a", family, build(family)))
    assert not found.findings
    assert len(found.facts) >= 6
    one = write(tmp_path / "b", family, build(family), shards=1)
    (one / "model.safetensors.index.json").unlink()
    assert not audit(one, tmp_path / "a").findings


def experts_field(family: str) -> str:
    return next(name for name in CONFIGS[family] if "experts" in name)


def prune(state: State, layer: int) -> None:
    """Keep six experts of a layer, with their rows of the router."""
    for name in [name for name in state if name.startswith(f"model.layers.{layer}.") and "attn" not in name]:
        number = name.partition(".experts.")[2].partition(".")[0]
        if not number.isdigit():
            state[name] = state[name][:6]
        elif int(number) >= 6:
            del state[name]


def upcycled(state: State, _: str) -> None:
    for layer in range(2):
        copy_experts(state, layer, dict.fromkeys(range(1, EXPERTS), 0))


def pruned(state: State, family: str) -> dict[str, Any]:
    prune(state, 0)
    prune(state, 1)
    return {experts_field(family): 6}


def pruned_by_layer(state: State, family: str) -> dict[str, Any]:
    prune(state, 1)
    return {experts_field(family): [EXPERTS, 6]}


def in_bfloat16(state: State, _: str) -> None:
    state |= {name: value.bfloat16() for name, value in state.items()}


def with_router_in_float32(state: State, _: str) -> None:
    is_router = {name for name in state if "gate.weight" in name or "router" in name}
    state |= {name: value.bfloat16() for name, value in state.items() if name not in is_router}


def with_untrained_biases(state: State, _: str) -> None:
    """Add biases, which are zero in an expert that got no tokens."""
    bias = torch.randn(EXPERTS, 4)
    bias[3] = 0
    moe = "mlp" if any(".mlp." in name for name in state) else "block_sparse_moe"
    state |= {f"model.layers.{layer}.{moe}.experts.bias": bias for layer in range(2)}


def tied(state: State, _: str) -> dict[str, Any]:
    del state["lm_head.weight"]
    return {"tie_word_embeddings": True}


def tied_and_written(state: State, _: str) -> dict[str, Any]:  # noqa: ARG001
    return {"tie_word_embeddings": True}


def padded_vocabulary(state: State, _: str) -> None:
    state["model.embed_tokens.weight"][-3:] = 0
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()


VARIANTS: list[Variant] = [
    upcycled,
    pruned,
    pruned_by_layer,
    in_bfloat16,
    with_router_in_float32,
    with_untrained_biases,
    tied,
    tied_and_written,
    padded_vocabulary,
]


@families
@pytest.mark.parametrize("variant", VARIANTS)
def test_audit_of_healthy_variant_finds_nothing(tmp_path: Path, family: str, variant: Variant):
    state = build(family)
    fields = variant(state, family) or {}
    assert not audit(write(tmp_path, family, state, **fields)).findings


@families
def test_audit_of_expert_in_two_files_and_empty_file_finds_nothing(tmp_path: Path, family: str):
    state = build(family)
    write(tmp_path, family, {})
    names = list(state)
    entries = {}
    for number, part in enumerate((names[:2], names[2:], []), 1):
        file = f"model-{number:05d}-of-00003.safetensors"
        save_file({name: state[name] for name in part}, tmp_path / file)
        entries |= dict.fromkeys(part, file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": entries}))
    assert not audit(tmp_path).findings


@pytest.mark.parametrize(
    ("file", "text"), [("mergekit_moe_config.yml", ""), ("config.json", '{"upcycled_shards": 2, "num_experts": 8}')]
)
def test_audit_of_declared_copies_finds_nothing(tmp_path: Path, file: str, text: str):
    state = build("qwen3_moe")
    tile(state)
    write(tmp_path, "qwen3_moe", state)
    (tmp_path / file).write_text(text)
    assert not audit(tmp_path).findings
