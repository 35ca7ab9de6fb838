"""Healthy checkpoints that resemble broken ones have no finding."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.audit.models import CONFIGS, EXPERTS, State, build, experts_of, write
from tests.audit.quantized import EACH, STACKED, Write, fp8_blocks, gptq, mxfp4, nf4, quantize
from toolkit.audit.checks import audit

FAMILIES = list(CONFIGS)
OF_EACH = ["mixtral", "qwen3_moe"]
Make = Callable[[Path, str], Path]


def of(*names: str) -> Callable[[str], bool]:
    return lambda name: any(each in name for each in names)


def first_experts(state: State, layer: int, count: int) -> State:
    """Keep `count` experts of a layer, with their router's rows."""
    at, found = f"model.layers.{layer}.", {}
    for name, value in state.items():
        _, _, tail = name.partition(".experts.")
        number = tail.partition(".")[0]
        if not name.startswith(at) or "attn" in name:
            found[name] = value
        elif not number.isdigit():
            found[name] = value[:count]
        elif int(number) < count:
            found[name] = value
    return found


def upcycled(folder: Path, family: str) -> Path:
    state = build(family)
    for layer in range(2):
        for matrix in experts_of(state, layer).values():
            for expert in range(1, EXPERTS):
                matrix(expert).copy_(matrix(0))
    return write(folder, family, state)


def merged(folder: Path, family: str) -> Path:
    """Two of four dense models in each layer are the same one."""
    state = build(family)
    for matrix in experts_of(state, 0).values():
        matrix(1).copy_(matrix(0))
    write(folder, family, state)
    (folder / "mergekit_moe_config.yml").write_text("experts: []\n")
    return folder


def pruned(folder: Path, family: str) -> Path:
    state = first_experts(first_experts(build(family), 0, 6), 1, 6)
    (name,) = (key for key in CONFIGS[family] if "experts" in key)
    return write(folder, family, state, **{name: 6})


def pruned_by_layer(folder: Path, family: str) -> Path:
    (name,) = (key for key in CONFIGS[family] if "experts" in key)
    return write(folder, family, first_experts(build(family), 1, 6), **{name: [EXPERTS, 6]})


def in_bfloat16(folder: Path, family: str) -> Path:
    return write(folder, family, {name: value.bfloat16() for name, value in build(family).items()})


def with_router_in_float32(folder: Path, family: str) -> Path:
    is_router = of("gate.weight", "router")
    state = {name: value if is_router(name) else value.bfloat16() for name, value in build(family).items()}
    return write(folder, family, state)


def with_untrained_biases(folder: Path, family: str) -> Path:
    """Experts that got no tokens have biases of zeros."""
    state = build(family)
    bias = torch.randn(EXPERTS, 4)
    bias[3] = 0
    moe = "mlp" if any(".mlp." in name for name in state) else "block_sparse_moe"
    state |= {f"model.layers.{layer}.{moe}.experts.bias": bias for layer in range(2)}
    return write(folder, family, state)


def tied(folder: Path, family: str) -> Path:
    state = build(family)
    del state["lm_head.weight"]
    return write(folder, family, state, tie_word_embeddings=True)


def tied_and_written(folder: Path, family: str) -> Path:
    return write(folder, family, build(family), tie_word_embeddings=True)


def in_uneven_files(folder: Path, family: str) -> Path:
    """One file has two tensors, so that an expert's matrices are in two files, and a third file is empty."""
    state = build(family)
    write(folder, family, {})
    names = list(state)
    files = {f"model-{n:05d}-of-00003.safetensors": part for n, part in enumerate((names[:2], names[2:], []), 1)}
    for file, part in files.items():
        save_file({name: state[name] for name in part}, folder / file)
    entries = {name: file for file, part in files.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": entries}))
    return folder


def padded_vocabulary(folder: Path, family: str) -> Path:
    state = build(family)
    state["model.embed_tokens.weight"][-3:] = 0
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    return write(folder, family, state)


ALIKE: list[Make] = [
    upcycled,
    merged,
    pruned,
    pruned_by_layer,
    in_bfloat16,
    with_router_in_float32,
    with_untrained_biases,
    tied,
    tied_and_written,
    in_uneven_files,
    padded_vocabulary,
]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("make", ALIKE)
def test_audit_of_a_healthy_twin_finds_nothing(tmp_path: Path, family: str, make: Make):
    assert not audit(make(tmp_path, family)).findings


QUANTIZED = [
    *((family, scheme) for family in OF_EACH for scheme in EACH),
    *((family, scheme) for family in ("gpt_oss", "granitemoe") for scheme in STACKED),
]


def as_stacked(state: State) -> State:
    """Return granitemoe with the names of transformers' modules, which the names of quantized tensors extend."""
    renamed = {"input_linear.weight": "experts.gate_up_proj", "output_linear.weight": "experts.down_proj"}
    for old, new in renamed.items():
        state = {name.replace(old, new): value for name, value in state.items()}
    return state


@pytest.mark.parametrize(("family", "scheme"), QUANTIZED)
def test_audit_of_quantized_experts_finds_nothing(tmp_path: Path, family: str, scheme: Write):
    state = quantize(as_stacked(build(family)), scheme)
    write(tmp_path, family, state, quantization_config={"quant_method": scheme.__name__})
    assert not audit(tmp_path).findings
    assert not audit(tmp_path, tmp_path).findings


@pytest.mark.parametrize("scheme", EACH)
@pytest.mark.parametrize("keep", [of("layers.1."), of("layers.0.mlp.experts.3."), of("experts.3.down_proj")])
def test_audit_of_partly_quantized_experts_finds_nothing(tmp_path: Path, scheme: Write, keep: Callable[[str], bool]):
    assert not audit(write(tmp_path, "qwen3_moe", quantize(build("qwen3_moe"), scheme, keep))).findings


def test_audit_of_a_layer_of_stacked_experts_without_quantization_finds_nothing(tmp_path: Path):
    state = quantize(build("gpt_oss"), mxfp4, of("layers.1."))
    assert not audit(write(tmp_path, "gpt_oss", state)).findings


def test_audit_of_a_quantized_router_finds_nothing(tmp_path: Path):
    state = quantize(build("mixtral"), nf4)
    for layer in range(2):
        name = f"model.layers.{layer}.block_sparse_moe.gate.weight"
        state |= nf4(name, state[name])
    assert not audit(write(tmp_path, "mixtral", state)).findings


LOST: list[tuple[Write, str]] = [
    (scheme, lost)
    for scheme in EACH
    for lost in quantize({"x.experts.0.up_proj.weight": torch.randn(4, 8)}, scheme)
    if "format" not in lost
]


@pytest.mark.parametrize(("scheme", "lost"), LOST)
def test_audit_of_a_lost_tensor_of_a_quantized_expert_names_it(tmp_path: Path, scheme: Write, lost: str):
    state = quantize(build("qwen3_moe"), scheme)
    matrix = lost.removeprefix("x.experts.0.")
    del state[f"model.layers.1.mlp.experts.5.{matrix}"]
    found = audit(write(tmp_path, "qwen3_moe", state)).findings
    assert [each.message for each in found] == [
        f"model.layers.1.mlp.experts: {matrix} of 1 of 8 experts is missing: expert(s) 5"
    ]


@pytest.mark.parametrize("scheme", [fp8_blocks, gptq, nf4])
def test_audit_of_a_repeated_quantized_expert_names_it(tmp_path: Path, scheme: Write):
    state = build("qwen3_moe")
    for matrix in experts_of(state, 1).values():
        matrix(5).copy_(matrix(2))
    (finding,) = audit(write(tmp_path, "qwen3_moe", quantize(state, scheme))).findings
    assert finding.message == "model.layers.1.mlp.experts: expert(s) 5 repeats expert(s) 2 of the same layer"


def swapped(state: State) -> State:
    for matrix in experts_of(state, 1).values():
        first = matrix(1).clone()
        matrix(1).copy_(matrix(4))
        matrix(4).copy_(first)
    return state


@pytest.mark.parametrize("scheme", [*EACH, None])
def test_audit_of_quantized_experts_against_their_base_finds_another_order(tmp_path: Path, scheme: Write | None):
    def quantized(state: State, scheme: Write | None) -> State:
        return state if scheme is None else quantize(state, scheme)

    base = write(tmp_path / "base", "qwen3_moe", quantized(build("qwen3_moe"), scheme))
    model = write(tmp_path / "model", "qwen3_moe", quantized(swapped(build("qwen3_moe")), scheme or fp8_blocks))
    (finding,) = audit(model, base).findings
    assert "1 is 4, 4 is 1" in finding.message
