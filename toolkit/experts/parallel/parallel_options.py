"""Options of EP groups, and of how they are repeated: by DDP or FSDP2."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from toolkit.errors import require
from toolkit.experts.options import Options
from toolkit.experts.placement.placement_options import ExpertExchange

Dense = Literal["ddp", "fsdp2"]
"""Replicas of EP groups and non-expert parameters (DDP), or shards of both (FSDP2)."""


class GroupOptions(Options):
    """EP groups: which processes share one set of experts, and how tokens are dispatched."""

    ep_size: PositiveInt | None = None
    """Processes in an expert-parallel group; none: the most that divide processes and experts."""
    ep_stride: PositiveInt = 1
    """How far apart the processes of an expert-parallel group are; 1: neighbours."""
    exchange: ExpertExchange = "flat"
    """Send a token to every process that has experts of it (flat), or once to each node that has (hierarchical)."""


class DenseOptions(Options):
    """DDP or FSDP2, on several processes."""

    dense_parallel: Dense = "ddp"
    """On several processes, replicate parameters and EP groups (DDP), or shard all over all processes (FSDP2)."""
    fsdp_size: Annotated[int, Field(ge=2)] | None = None
    """Neighbouring processes that share one set of shards with FSDP2 (HSDP); none: all."""


class DDPOptions(Options):
    """DDP, on several processes."""

    find_unused_parameters: bool = False
    """Look for parameters without a gradient in each step; for models that do not use all of them."""
    static_graph: bool = False
    """The same parameters are used in every step."""
    bucket_cap_mb: PositiveInt = 25
    """Size of a bucket of gradients that is averaged at once, in MiB."""
    gradient_as_bucket_view: bool = False
    """Keep gradients in the buckets, which saves their memory once."""
    broadcast_buffers: bool = True
    """Copy buffers, such as running means, from the first process before each forward pass."""
    comm_hook: Literal["no", "fp16", "bf16"] = "no"
    """Type of the gradients in the all-reduce."""

    def check_together(self) -> None:
        super().check_together()
        both = self.find_unused_parameters and self.static_graph
        require(not both, "static_graph", True, "leave find_unused_parameters=True out: it finds them by itself")
