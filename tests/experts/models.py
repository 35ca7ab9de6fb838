"""Small MoE layers: of `make_moe`, and of another library with stacked experts in a loop."""

import torch
from torch import Tensor, nn

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


class StackedExperts(nn.Module):
    def __init__(self, dim: int, width: int, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.up = nn.Parameter(torch.randn(num_experts, dim, width) * dim**-0.5)
        self.down = nn.Parameter(torch.randn(num_experts, width, dim) * width**-0.5)

    def forward(self, hidden: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden)
        for expert in range(self.num_experts):
            token, choice = (expert_ids == expert).nonzero(as_tuple=True)
            out = out.index_add(0, token, self.compute(expert, hidden[token], weights[token, choice, None]))
        return out

    def compute(self, expert: int, x: Tensor, weight: Tensor) -> Tensor:
        return (x @ self.up[expert]).tanh() @ self.down[expert] * weight


class Block(nn.Module):
    def __init__(self, dim: int, width: int, num_experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, num_experts, bias=False)
        self.experts = StackedExperts(dim, width, num_experts)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.gate(x).softmax(-1).topk(2)
        return x + self.experts(x, ids, self.experts.num_experts * weights)
