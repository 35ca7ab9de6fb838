"""Audits of checkpoints with quantized experts."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.audit.models import State, build, copy_experts, write
from toolkit.audit.checks import audit

Parts = dict[str, Tensor]
"""Tensors that replace the matrix of an expert, or of all experts of a layer: "+" extends its name, other suffixes
replace "weight"."""


def _bytes(value: Tensor) -> Tensor:
    return (value * 20 + 128).clamp(0, 255).to(torch.uint8)


def _words(value: Tensor) -> Tensor:
    return (value * 2**24).to(torch.int32)


def _half(value: Tensor) -> Tensor:
    return value[..., : value.shape[-1] // 2].contiguous()


def nf4(value: Tensor) -> Parts:
    """4-bit bitsandbytes with double quantization, whose settings differ in length by expert."""
    settings = json.dumps({"quant_type": "nf4", "nested_offset": round(value.mean().item(), 3 + value.numel() % 7)})
    offset = json.dumps({"settings": settings, "sum": str(value.sum().item())[: 4 + int(value.abs().sum() * 100) % 5]})
    return {
        "+": _bytes(value).reshape(-1, 2)[:, :1].contiguous(),
        "+.absmax": _bytes(value.abs().amax(1)),
        "+.quant_map": torch.linspace(-1, 1, 16),
        "+.nested_absmax": value.abs().amax().reshape(1),
        "+.nested_quant_map": torch.linspace(-1, 1, 256),
        "+.quant_state.bitsandbytes__nf4": torch.frombuffer(bytearray(offset, "utf-8"), dtype=torch.uint8),
    }


def int8(value: Tensor) -> Parts:
    """8-bit bitsandbytes."""
    parts = {"+": (value * 20).to(torch.int8), "SCB": value.abs().amax(1)}
    return parts | {"weight_format": torch.zeros((), dtype=torch.uint8)}


def fp8_blocks(value: Tensor) -> Parts:
    """float8 with a scale per block, as in DeepSeek-V3."""
    scale = value.abs().amax((-2, -1), keepdim=True) / 448
    return {"+": (value / scale).to(torch.float8_e4m3fn), "+_scale_inv": scale}


def fp8_tensors(value: Tensor) -> Parts:
    """float8 with a scale per tensor, and an input scale that experts share."""
    scales = {"+_scale": value.abs().amax((-2, -1)) / 448, "input_scale": torch.tensor(0.5)}
    return {"+": value.to(torch.float8_e4m3fn)} | scales


def gptq(value: Tensor) -> Parts:
    """Symmetric GPTQ, with equal zero points."""
    return {
        "qweight": _words(value.T.contiguous()),
        "qzeros": torch.full((2, value.shape[0] // 2), 0x77777777, dtype=torch.int32),
        "scales": value.T[:2].half().contiguous(),
        "g_idx": torch.arange(value.shape[1], dtype=torch.int32) // 4,
    }


def awq(value: Tensor) -> Parts:
    """AWQ, with zero points."""
    zeros, scales = _words(value.T[:2]), value.T[:2].half().contiguous()
    return {"qweight": _words(_half(value.T)), "qzeros": zeros, "scales": scales}


def compressed(value: Tensor) -> Parts:
    """4-bit compressed-tensors."""
    scale = value[:, :2].bfloat16().contiguous()
    return {"+_packed": _words(_half(value)), "+_scale": scale, "+_shape": torch.tensor(value.shape)}


def mxfp4(value: Tensor) -> Parts:
    """MXFP4 of stacked experts, as in gpt-oss."""
    blocks = value.transpose(1, 2).unflatten(2, (-1, 2))
    return {"+_blocks": _bytes(blocks), "+_scales": _bytes(blocks.abs().amax(3))}


Scheme = Callable[[Tensor], Parts]
SEPARATE: list[Scheme] = [nf4, int8, fp8_blocks, fp8_tensors, gptq, awq, compressed]
"""Schemes of families with a tensor per expert."""
STACKED: list[Scheme] = [mxfp4, fp8_blocks, fp8_tensors]
"""Schemes of families with a tensor per layer."""


def quantize(state: State, scheme: Scheme, *, part: str = ".experts.", kept: str = "?") -> State:
    """Quantize the matrices whose names contain `part` and not `kept`."""
    found: State = {}
    for name, value in state.items():
        if part in name and not name.endswith("bias") and kept not in name:
            stem = name.removesuffix("weight")
            found |= {key.replace("+", name) if "+" in key else stem + key: each for key, each in scheme(value).items()}
        else:
            found[name] = value
    return found


def with_module_names(state: State) -> State:
    """Rename granitemoe's experts as transformers names modules, whose names quantized tensors extend."""
    renamed = {"input_linear.weight": "experts.gate_up_proj", "output_linear.weight": "experts.down_proj"}
    for old, new in renamed.items():
        state = {name.replace(old, new): value for name, value in state.items()}
    return state


@pytest.mark.parametrize(
    ("family", "scheme"),
    [
        *((family, scheme) for family in ("mixtral", "qwen3_moe") for scheme in SEPARATE),
        *((family, scheme) for family in ("gpt_oss", "granitemoe") for scheme in STACKED),
    ],
)
def test_audit_of_quantized_experts_finds_nothing(tmp_path: Path, family: str, scheme: Scheme):
    state = quantize(with_module_names(build(family)), scheme)
    write(tmp_path, family, state, quantization_config={"quant_method": scheme.__name__})
    assert not audit(tmp_path).findings
    assert not audit(tmp_path, tmp_path).findings


@pytest.mark.parametrize("scheme", [*SEPARATE, mxfp4])
@pytest.mark.parametrize("kept", ["layers.1.", "layers.0.mlp.experts.3.", "experts.3.down_proj"])
def test_audit_of_partly_quantized_experts_finds_nothing(tmp_path: Path, scheme: Scheme, kept: str):
    family = "gpt_oss" if scheme is mxfp4 else "qwen3_moe"
    assert not audit(write(tmp_path, family, quantize(build(family), scheme, kept=kept))).findings


def test_audit_of_quantized_router_finds_nothing(tmp_path: Path):
    state = quantize(quantize(build("mixtral"), nf4), nf4, part=".gate.")
    assert not audit(write(tmp_path, "mixtral", state)).findings


MISSING: list[tuple[Scheme, str]] = [
    (scheme, name)
    for scheme in SEPARATE
    for name in quantize({"x.experts.0.up_proj.weight": torch.randn(4, 8)}, scheme)
    if "format" not in name
]


@pytest.mark.parametrize(("scheme", "name"), MISSING)
def test_audit_of_missing_quantized_tensor_reports_expert(tmp_path: Path, scheme: Scheme, name: str):
    state = quantize(build("qwen3_moe"), scheme)
    matrix = name.removeprefix("x.experts.0.")
    del state[f"model.layers.1.mlp.experts.5.{matrix}"]
    (finding,) = audit(write(tmp_path, "qwen3_moe", state)).findings
    assert finding.message == f"model.layers.1.mlp.experts: {matrix} of 1 of 8 experts is missing: expert(s) 5"


@pytest.mark.parametrize("scheme", [fp8_blocks, gptq, nf4])
def test_audit_of_repeated_quantized_expert_reports_it(tmp_path: Path, scheme: Scheme):
    state = quantize(copy_experts(build("qwen3_moe"), 1, {5: 2}), scheme)
    (finding,) = audit(write(tmp_path, "qwen3_moe", state)).findings
    assert finding.message == "model.layers.1.mlp.experts: expert(s) 5 repeats expert(s) 2 of the same layer"


@pytest.mark.parametrize("scheme", [*SEPARATE, None])
def test_audit_of_quantized_experts_against_base_reports_order(tmp_path: Path, scheme: Scheme | None):
    state = build("qwen3_moe")  # a base without quantization if scheme is None
    base = write(tmp_path / "base", "qwen3_moe", quantize(state, scheme) if scheme else state)
    state = copy_experts(build("qwen3_moe"), 1, {1: 4, 4: 1})
    model = write(tmp_path / "model", "qwen3_moe", quantize(state, scheme or fp8_blocks))
    (finding,) = audit(model, base).findings
    assert "1 is 4, 4 is 1" in finding.message
