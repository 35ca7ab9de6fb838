"""Small layers of `make_moe`."""

import torch
from torch import nn

from toolkit.experts.layer.moe_layer import MoE, make_moe
from toolkit.experts.parallel.collectives import world_size
from toolkit.experts.parallel.groups import make_expert_groups
from toolkit.train.models.mlp import MLP


def make_layer(*sizes, groups=None, ep_size=None, ep_stride=1, shared_expert=False, **options) -> MoE:
    """Return a layer of `make_moe` with random router weights; its experts are sharded over all ranks by default."""
    torch.manual_seed(1)
    groups = groups or make_expert_groups(ep_size or world_size(), ep_stride=ep_stride)
    shared = MLP(sizes[0], 8, sizes[0]) if shared_expert else None
    layer = make_moe(*sizes, groups=groups, shared_expert=shared, **options)
    nn.init.normal_(layer.router.weight)
    return layer
