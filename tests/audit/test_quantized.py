"""Audits of checkpoints with quantized experts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.audit.models import State, build, copy_experts, write
from tests.audit.quantized import SEPARATE, STACKED, Scheme, fp8_blocks, gptq, mxfp4, nf4, quantize
from toolkit.audit.checks import audit


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


@pytest.mark.parametrize("scheme", SEPARATE)
@pytest.mark.parametrize("kept", ["layers.1.", "layers.0.mlp.experts.3.", "experts.3.down_proj"])
def test_audit_of_partly_quantized_experts_finds_nothing(tmp_path: Path, scheme: Scheme, kept: str):
    assert not audit(write(tmp_path, "qwen3_moe", quantize(build("qwen3_moe"), scheme, kept=kept))).findings


def test_audit_of_partly_quantized_stacked_experts_finds_nothing(tmp_path: Path):
    assert not audit(write(tmp_path, "gpt_oss", quantize(build("gpt_oss"), mxfp4, kept="layers.1."))).findings


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
    state = build("qwen3_moe")  # a base without quantization if there is no scheme
    base = write(tmp_path / "base", "qwen3_moe", quantize(state, scheme) if scheme else state)
    state = copy_experts(build("qwen3_moe"), 1, {1: 4, 4: 1})
    model = write(tmp_path / "model", "qwen3_moe", quantize(state, scheme or fp8_blocks))
    (finding,) = audit(model, base).findings
    assert "1 is 4, 4 is 1" in finding.message
