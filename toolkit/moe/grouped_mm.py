"""One matrix product per expert, all in one call."""

from __future__ import annotations

import torch
from torch import Tensor


def grouped_mm(x_ND: Tensor, weight_SDF: Tensor, rows_per_slot: Tensor) -> Tensor:
    """Multiply each slot's rows of `x_ND` (slot 0's first) with that slot's matrix; returns (N, F).

    Under autocast the operands are cast as `torch.mm` would cast them. `torch.nn.functional.grouped_mm` is used where
    it accepts the type and alignment (rows of a multiple of 16 bytes; float32, bfloat16, float16); elsewhere slots are
    padded to a common length and multiplied as a batch.
    """
    device = x_ND.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        x_ND, weight_SDF = x_ND.to(dtype), weight_SDF.to(dtype)
    if _grouped_mm_accepts(x_ND, weight_SDF):
        return torch.nn.functional.grouped_mm(x_ND, weight_SDF, offs=rows_per_slot.cumsum(0).int())
    return _padded_mm(x_ND, weight_SDF, rows_per_slot)


def _grouped_mm_accepts(x_ND: Tensor, weight_SDF: Tensor) -> bool:
    if x_ND.dtype not in (torch.float32, torch.bfloat16, torch.float16) or x_ND.dtype != weight_SDF.dtype:
        return False
    return all(size * x_ND.element_size() % 16 == 0 for size in weight_SDF.shape[1:])


def _padded_mm(x_ND: Tensor, weight_SDF: Tensor, rows_per_slot: Tensor) -> Tensor:
    slots, longest = len(rows_per_slot), int(rows_per_slot.max()) if len(rows_per_slot) else 0
    slot_N = torch.repeat_interleave(torch.arange(slots, device=x_ND.device), rows_per_slot)
    first_S = rows_per_slot.cumsum(0) - rows_per_slot
    place_N = slot_N * longest + torch.arange(len(x_ND), device=x_ND.device) - first_S[slot_N]
    padded = x_ND.new_zeros(slots * longest, x_ND.shape[1]).index_copy(0, place_N, x_ND)
    product = torch.bmm(padded.view(slots, longest, x_ND.shape[1]), weight_SDF)
    return product.view(slots * longest, weight_SDF.shape[2]).index_select(0, place_N)
