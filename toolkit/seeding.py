"""Randomness that is addressed, not carried.

A generator whose state travels through a run has to be saved, restored and kept aligned on every rank. Instead each
draw has an address, such as (seed, step, micro-batch, rank), and its seed is a hash of that address. A resumed run
draws the same numbers because it asks at the same address.
"""

from __future__ import annotations

import hashlib

import torch


def derive_seed(*address: int | str) -> int:
    """A 63-bit seed that is a pure function of `address`, alike on every machine and Python version."""
    digest = hashlib.blake2b(repr(address).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator(*address: int | str) -> torch.Generator:
    """A CPU generator for the draws made at `address`."""
    return torch.Generator().manual_seed(derive_seed(*address))


def seed_device(device: torch.device, *address: int | str) -> None:
    """Seed what dropout and the like draw from, on `device` and on the CPU.

    `torch.manual_seed` does this for every back end there is, which costs more than a small model's forward.
    """
    seed = derive_seed(*address)
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    elif device.type != "cpu":
        torch.manual_seed(seed)
