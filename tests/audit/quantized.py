"""Experts as quantizations write them: the names, types and shapes of their tensors, with values of the original."""

from __future__ import annotations

import json
from collections.abc import Callable

import torch
from torch import Tensor

from tests.audit.models import State

Write = Callable[[str, Tensor], State]
"""Gives the tensors that replace a matrix of an expert, or of all experts of a layer."""


def _bytes(value: Tensor) -> Tensor:
    return (value * 20 + 128).clamp(0, 255).to(torch.uint8)


def _words(value: Tensor) -> Tensor:
    return (value * 2**24).to(torch.int32)


def _halves(value: Tensor) -> Tensor:
    return value[..., : value.shape[-1] // 2].contiguous()


def nf4(name: str, value: Tensor) -> State:
    """bitsandbytes in 4 bits with double quantization: the text of its settings differs in length by expert."""
    settings = json.dumps({"quant_type": "nf4", "nested_offset": round(value.mean().item(), 3 + value.numel() % 7)})
    offset = json.dumps({"settings": settings, "sum": str(value.sum().item())[: 4 + int(value.abs().sum() * 100) % 5]})
    return {
        name: _bytes(value).reshape(-1, 2)[:, :1].contiguous(),
        f"{name}.absmax": _bytes(value.abs().amax(1)),
        f"{name}.quant_map": torch.linspace(-1, 1, 16),
        f"{name}.nested_absmax": value.abs().amax().reshape(1),
        f"{name}.nested_quant_map": torch.linspace(-1, 1, 256),
        f"{name}.quant_state.bitsandbytes__nf4": torch.frombuffer(bytearray(offset, "utf-8"), dtype=torch.uint8),
    }


def int8(name: str, value: Tensor) -> State:
    """bitsandbytes in 8 bits."""
    module = name.removesuffix("weight")
    scales = value.abs().amax(1)
    return {
        name: (value * 20).to(torch.int8),
        f"{module}SCB": scales,
        f"{module}weight_format": torch.zeros((), dtype=torch.uint8),
    }


def fp8_blocks(name: str, value: Tensor) -> State:
    """float8 with a scale for each block, as in DeepSeek-V3."""
    scale = value.abs().amax((-2, -1), keepdim=True) / 448
    return {name: (value / scale).to(torch.float8_e4m3fn), f"{name}_scale_inv": scale}


def fp8_tensors(name: str, value: Tensor) -> State:
    """float8 with a scale for each tensor, and one for its input, which experts share."""
    return {
        name: value.to(torch.float8_e4m3fn),
        f"{name}_scale": value.abs().amax((-2, -1)) / 448,
        f"{name.removesuffix('weight')}input_scale": torch.tensor(0.5),
    }


def gptq(name: str, value: Tensor) -> State:
    """Symmetric GPTQ, whose zero points are all equal."""
    module = name.removesuffix("weight")
    return {
        f"{module}qweight": _words(value.T.contiguous()),
        f"{module}qzeros": torch.full((2, value.shape[0] // 2), 0x77777777, dtype=torch.int32),
        f"{module}scales": value.T[:2].half().contiguous(),
        f"{module}g_idx": torch.arange(value.shape[1], dtype=torch.int32) // 4,
    }


def awq(name: str, value: Tensor) -> State:
    """AWQ, with zero points."""
    module = name.removesuffix("weight")
    return {
        f"{module}qweight": _words(_halves(value.T)),
        f"{module}qzeros": _words(value.T[:2]),
        f"{module}scales": value.T[:2].half().contiguous(),
    }


def compressed(name: str, value: Tensor) -> State:
    """compressed-tensors in 4 bits."""
    return {
        f"{name}_packed": _words(_halves(value)),
        f"{name}_scale": value[:, :2].bfloat16().contiguous(),
        f"{name}_shape": torch.tensor(value.shape),
    }


def nvfp4(name: str, value: Tensor) -> State:
    """NVFP4, with scales of blocks in float8 and of tensors in float32."""
    return {
        f"{name}_packed": _bytes(_halves(value)),
        f"{name}_scale": value[:, :1].abs().to(torch.float8_e4m3fn),
        f"{name}_global_scale": value.abs().amax().reshape(1),
        f"{name.removesuffix('weight')}input_global_scale": torch.ones(1),
    }


def mxfp4(name: str, value: Tensor) -> State:
    """MXFP4 of stacked experts, as in gpt-oss."""
    blocks = value.transpose(1, 2).unflatten(2, (-1, 2))
    return {f"{name}_blocks": _bytes(blocks), f"{name}_scales": _bytes(blocks.abs().amax(3))}


EACH: list[Write] = [nf4, int8, fp8_blocks, fp8_tensors, gptq, awq, compressed, nvfp4]
"""Of families with a tensor for each expert."""
STACKED: list[Write] = [mxfp4, fp8_blocks, fp8_tensors]
"""Of families with a tensor for all experts of a layer."""


def quantize(state: State, write: Write, keep: Callable[[str], bool] = lambda _: False) -> State:
    """Return `state` with the matrices of experts quantized, unless `keep(name)`."""
    found: State = {}
    for name, value in state.items():
        is_expert = ".experts." in name and not name.endswith("bias")
        found |= write(name, value) if is_expert and not keep(name) else {name: value}
    return found
