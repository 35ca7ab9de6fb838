"""Random generators seeded by an address instead of a saved state.

The state of a generator would have to be saved, restored and kept equal on all ranks. Instead each draw has an address,
such as (seed, step, micro-batch, rank), and is seeded with a hash of it, so a resumed run draws the same numbers.
"""

from __future__ import annotations

import hashlib

import torch


def derive_seed(*address: int | str) -> int:
    """A 63-bit seed: a hash of `address`, the same on every machine and Python version."""
    digest = hashlib.blake2b(repr(address).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator(*address: int | str) -> torch.Generator:
    """A CPU generator seeded by `address`."""
    return torch.Generator().manual_seed(derive_seed(*address))


def seed_device(device: torch.device, *address: int | str) -> None:
    """Seed the global generators of `device` and the CPU, from which dropout draws.

    `torch.manual_seed` seeds every back end, which takes longer than the forward of a small model.
    """
    seed = derive_seed(*address)
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    elif device.type != "cpu":
        torch.manual_seed(seed)
