"""A run whose numbers are rounded otherwise, as they are on another processor or where a batch is cut into parts.

What it does differently from the run it repeats, it does because of rounding alone: how far rounding errors grow in a
model, and in its optimizer, is seen from it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from toolkit.commands.doctor.compare import GRADIENT_FLOOR


def round_outputs(module: nn.Module, name: str, size: float, step: Callable[[], int]) -> None:
    """From now on, change what `module` returns in training, and the gradient of it, by `size` times their norms.

    `step` says which optimizer step it is; in one step, the change is always the same, so that a forward that is
    repeated during backward repeats it. A module without parameters of its own is left alone: it adds up nothing, or
    calls others that do, and zeros that it returns are to stay zeros.
    """
    if not any(True for _ in module.parameters(recurse=False)):
        return

    def change(output: Any, seed: int) -> Any:
        if type(output) is tuple:
            return tuple(change(part, seed + 2 * number) for number, part in enumerate(output))
        if not (isinstance(output, Tensor) and output.requires_grad):
            return output
        changed = output + _noise(output.detach(), size, seed)
        changed.register_hook(lambda gradient: gradient + _noise(gradient, size, seed + 1))
        return changed

    def after_forward(module: nn.Module, _args: Any, output: Any) -> Any:
        return change(output, zlib.crc32(f"{name} {step()}".encode())) if module.training else output

    module.register_forward_hook(after_forward)


@torch.no_grad()
def round_gradients(gradients: list[Tensor], size: float, step: int) -> None:
    """Change gradients in place, each by `size` times its norm, or times `GRADIENT_FLOOR` of the norm of all."""
    total = torch.stack([gradient.norm() for gradient in gradients]).norm().item()
    for number, gradient in enumerate(gradients):
        gradient.add_(_noise(gradient, size, zlib.crc32(f"{number} {step}".encode()), GRADIENT_FLOOR * total))


def _noise(tensor: Tensor, size: float, seed: int, floor: float = 0.0) -> Tensor:
    """Of `size` times the norm of `tensor`, or times `floor` where that is more.

    None where `tensor` is exactly 0, as units that ReLU has switched off are: nothing was added up there. Adam would
    make a whole step of any noise.
    """
    draws = torch.Generator().manual_seed(seed)
    noise = torch.randn(tensor.shape, generator=draws, dtype=tensor.dtype).to(tensor.device)
    return noise * (tensor != 0) * (max(tensor.norm().item(), floor) * size / max(1, tensor.numel()) ** 0.5)
