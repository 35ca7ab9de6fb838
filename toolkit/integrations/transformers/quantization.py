"""4-bit experts: frozen expert matrices in NF4 of bitsandbytes, one packed row per expert.

    with experts_in_files(quantize="4bit"):
        model = AutoModelForCausalLM.from_pretrained(folder, experts_implementation=use_toolkit_kernel())
    model = get_peft_model(model, LoraConfig(target_parameters=[...]))

bitsandbytes quantises and dequantises. Blocks of 64 numbers lie within a row, so the bytes of a row do not depend on
its rank or slot: rows migrate, are replicated and saved as bytes, with the scales of their blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from toolkit.integrations.transformers.cpu_offload import rows_on

if TYPE_CHECKING:
    from jaxtyping import Float, Int, UInt8

BLOCK = 64
"""Numbers that share a scale."""
SCALES = "_scales"
"""Suffix of the name of a parameter's scales."""


class Packed(NamedTuple):
    """Unpacked shape and dtype of the rows of a parameter."""

    shape: torch.Size
    """(A, B) of a row."""
    dtype: torch.dtype


class PackedRows(nn.Module):
    """Experts with matrices that may be packed."""

    packed: Mapping[str, Packed] = MappingProxyType({})


def pack_rows(module: PackedRows, rows: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the `rows` of `module` with matrices packed, and their scales under further names.

    `module` gets parameters for the scales, and `packed`, a `Packed` by name.
    """
    from bitsandbytes.functional import quantize_4bit

    packed, result = {}, dict(rows)
    for name, value in rows.items():
        if not _can_be_packed(value):
            continue
        bits, state = quantize_4bit(value.reshape(-1, BLOCK), blocksize=BLOCK, quant_type="nf4")
        packed[name] = Packed(value.shape[1:], value.dtype)
        result[name] = bits.view(len(value), -1)
        # As integers, because a cast of the model would round scales.
        result[name + SCALES] = state.absmax.view(len(value), -1).view(torch.int32)
        module.register_parameter(name + SCALES, nn.Parameter(result[name + SCALES], requires_grad=False))
    module.packed = packed
    return result


def give_packed_shapes(module: PackedRows) -> None:
    """Give `module`, whose parameters are on the meta device, the parameters that `pack_rows` would."""
    packed = {}
    for name, value in list(module.named_parameters(recurse=False)):
        if _can_be_packed(value):
            packed[name] = Packed(value.shape[1:], value.dtype)
            numbers = value[0].numel()
            bits = value.new_empty(len(value), numbers // 2, dtype=torch.uint8)
            scales = value.new_empty(len(value), numbers // BLOCK, dtype=torch.int32)
            for key, rows in ((name, bits), (name + SCALES, scales)):
                setattr(module, key, nn.Parameter(rows, requires_grad=False))
    module.packed = packed


def _can_be_packed(rows: Tensor) -> bool:
    return rows.ndim == 3 and rows.shape[1:].numel() % BLOCK == 0


def unpacked(module: Any, name: str, device: torch.device, part: slice = slice(None)) -> Float[Tensor, "S A B"]:
    """Return the rows of a packed parameter on `device`, in the type that they had, or one of its `parts_of_rows`."""
    bits_SN, scales_SM = rows_on(module, name, device), rows_on(module, name + SCALES, device)
    (rows, columns), dtype = module.packed[name]
    begin, end, _ = part.indices(rows)
    first, last = begin * columns, end * columns
    return _unpack(
        bits_SN[:, first // 2 : last // 2],
        scales_SM[:, first // BLOCK : last // BLOCK],
        Packed(torch.Size((end - begin, columns)), dtype),
    )


def parts_of_rows(module: Any, name: str, most_bytes: int) -> list[slice]:
    """Return parts of the matrices (A, B) of a packed parameter, as slices of A that begin at a block of scales. Those
    of all slots have at most `most_bytes` once unpacked, or are `BLOCK` rows."""
    (rows, columns), dtype = module.packed[name]
    step = max(1, most_bytes // (BLOCK * columns * dtype.itemsize * len(module.get_parameter(name)))) * BLOCK
    return [slice(begin, min(begin + step, rows)) for begin in range(0, rows, step)]


def unpack_state(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Replace packed rows and their scales in a state dict of `model` by rows in the type that they had."""
    for prefix, module in model.named_modules():
        for name, was in packed_rows(module).items():
            key = f"{prefix}.{name}".removeprefix(".")
            if (scales := state.pop(key + SCALES, None)) is not None:
                state[key] = _unpack(state[key], scales, was)


def _unpack(bits: UInt8[Tensor, "S N"], scales: Int[Tensor, "S M"], was: Packed) -> Float[Tensor, "S A B"]:
    from bitsandbytes.functional import QuantState, dequantize_4bit

    state = QuantState(
        absmax=scales.view(torch.float32).flatten(),
        # As blocks: on a CPU bitsandbytes 0.50 gives other numbers for a matrix with, say, 16 columns.
        shape=torch.Size((2 * bits.numel() // BLOCK, BLOCK)),
        code=_values(bits.device),
        blocksize=BLOCK,
        quant_type="nf4",
        dtype=was.dtype,
    )
    return dequantize_4bit(bits.reshape(-1, 1), state).view(len(bits), *was.shape)


@cache
def _values(device: torch.device) -> Float[Tensor, " 16"]:
    """Return the values of the sixteen codes. Cached by device, because copying them is a host sync."""
    from bitsandbytes.functional import get_4bit_type

    return get_4bit_type("nf4", device=device, blocksize=BLOCK)


def is_scales(model: nn.Module, name: str) -> bool:
    """Return whether the parameter `name` of `model` holds the scales of a packed one."""
    module, _, parameter = name.rpartition(".")
    return parameter.endswith(SCALES) and is_packed(model.get_submodule(module), parameter.removesuffix(SCALES))


def packed_rows(module: nn.Module) -> Mapping[str, Packed]:
    """Return the packed parameters of `module`, by name."""
    return module.packed if isinstance(module, PackedRows) else {}


def is_packed(module: nn.Module, name: str) -> bool:
    """Return whether the rows of the parameter `name` are packed."""
    return name in packed_rows(module)
