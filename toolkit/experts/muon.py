"""Muon for matrices and stacks of expert matrices, with AdamW for the other parameters."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from toolkit.experts.layer.router import TopKRouter
from toolkit.experts.parallel.ownership import is_dtensor, ownership_of
from toolkit.experts.sharding.find import router_candidates, stacked_experts

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""The quintic Newton-Schulz iteration of Jordan et al. (https://kellerjordan.github.io/posts/muon), as in torch."""
ITERATIONS, EPSILON = 5, 1e-7
Group = dict[str, Any]


class Muon(Optimizer):
    """Momentum that is orthogonalized for each matrix, and AdamW for vectors, embeddings, routers and the output layer.

    A stack of experts, shape (E, A, B), is E matrices: one batched Newton-Schulz iteration per stack. The momentum of
    an expert is a row of the optimizer state, so it is migrated and saved with the expert. For the iteration, ranks
    that have shards of the same experts exchange them, so that each computes some of the experts. Other matrices that
    FSDP2 shards are gathered.

    Updates have the root mean square of AdamW's, 0.2 sqrt(max(A, B)) times an orthogonal matrix (Liu et al. 2025,
    https://arxiv.org/abs/2502.16982, section 2.2), so one learning rate and weight decay serve all parameters. Matrices
    are orthogonalized in bfloat16, as `torch.optim.Muon` does, on a CPU in float32, where many processors emulate
    bfloat16 products, and float64 matrices in float64.

    Args:
        params: Groups of `muon_groups`, or other groups with a boolean `"orthogonalize"`.
        lr: The learning rate.
        weight_decay: Decoupled weight decay of the matrices and embeddings.
        momentum: Nesterov momentum of the matrices.
        betas: AdamW's, for the other parameters.

    Example:
        >>> import torch
        >>> from toolkit import experts
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), experts.make_moe(16, 32, num_experts=4, top_k=2))
        >>> optimizer = experts.Muon(experts.muon_groups(model), lr=1e-3)
        >>> model(torch.randn(5, 8)).sum().backward()
        >>> optimizer.step()
        >>> sorted(optimizer.state[model[0].weight])
        ['momentum_buffer']
    """

    def __init__(
        self,
        params: list[Group],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.999),
    ):
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "betas": betas}
        super().__init__(params, {**defaults, "orthogonalize": True})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            gradients = {parameter: parameter.grad for parameter in group["params"] if parameter.grad is not None}
            if group["orthogonalize"]:
                for parameter, gradient in gradients.items():
                    self._step_matrices(parameter, gradient, group)
            elif gradients:
                self._step_elements(gradients, group)
        return loss

    def _step_matrices(self, parameter: Tensor, gradient: Tensor, group: Group) -> None:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        momentum = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        update = orthogonal(gradient.lerp(momentum, group["momentum"]))
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(update, alpha=-group["lr"] * 0.2 * max(parameter.shape[-2:]) ** 0.5)

    def _step_elements(self, gradients: dict[Tensor, Tensor], group: Group) -> None:
        states = [self.state[parameter] for parameter in gradients]
        for parameter, state in zip(gradients, states, strict=True):
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        adamw(
            list(gradients),
            list(gradients.values()),
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=1e-8,
            maximize=False,
        )


def orthogonal(matrices: Tensor) -> Tensor:
    """Return U V^T of each matrix U S V^T, approximately: its singular values are between 0.5 and 1.5.

    Args:
        matrices: Shape (A, B) or (E, A, B); a `DTensor` may be sharded along any dimension. A collective then.

    Returns:
        The shape and sharding of `matrices`, in float64 for float64, in float32 on a CPU, and else in bfloat16.
    """
    if is_dtensor(matrices):
        from torch.distributed.tensor import DTensor, Replicate, Shard

        mesh, placements = matrices.device_mesh, matrices.placements
        if isinstance(sharded := placements[-1], Shard) and 0 < sharded.dim < matrices.ndim == 3:
            local = _orthogonal_shards(matrices.to_local(), sharded.dim, mesh.get_group(mesh.ndim - 1))
            return DTensor.from_local(local, mesh, placements, run_check=False)
        whole = DTensor.from_local(orthogonal(matrices.full_tensor()), mesh, [Replicate()] * mesh.ndim, run_check=False)
        return whole.redistribute(mesh, placements)
    a, b, c = COEFFICIENTS
    precise = torch.promote_types(matrices.dtype, torch.float32)
    x = matrices.to(precise if matrices.device.type == "cpu" or precise == torch.float64 else torch.bfloat16)
    is_tall = x.shape[-2] > x.shape[-1]
    x = (x.mT if is_tall else x).reshape(-1, min(x.shape[-2:]), max(x.shape[-2:]))
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=EPSILON)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if is_tall else x).reshape(matrices.shape)


def _orthogonal_shards(shards: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's shards, along `dim`, of U V^T of each matrix. Each rank of `group` computes some matrices."""
    ranks = dist.get_world_size(group)
    each = -(-len(shards) // ranks)
    padded = shards.new_zeros(ranks * each, *shards.shape[1:])
    padded[: len(shards)] = shards
    received = torch.empty_like(padded)
    dist.all_to_all_single(received, padded, group=group)
    updates = orthogonal(torch.cat(received.chunk(ranks), dim))
    sent = torch.cat(updates.chunk(ranks, dim)).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received[: len(shards)]


def muon_groups(model: nn.Module) -> list[Group]:
    """Return the trainable parameters of a model as groups for `Muon`.

    Matrices and stacks of expert matrices are orthogonalized. AdamW steps vectors, expert biases, embeddings, routers
    (orthogonalized ones left experts unused), and the output layer if the model has `get_output_embeddings`, as
    transformers' models have. Vectors have no weight decay.

    Args:
        model: Before or after its experts are sharded.

    Returns:
        Groups with `"orthogonalize"`; a group that would be empty is left out.
    """
    elementwise: list[Any] = [m for m in model.modules() if isinstance(m, (nn.Embedding, TopKRouter))]
    elementwise += [
        *chain.from_iterable(router_candidates(model).values()),
        getattr(model, "get_output_embeddings", lambda: None)(),
    ]
    by_adamw = {module.weight for module in elementwise if module is not None}
    layers = stacked_experts(model).values()
    dims_of_rows = {p: found.rows(p, form).ndim for found in layers for p, form in found.parameters().values()}
    groups: dict[tuple[bool, bool, bool], list[nn.Parameter]] = {}
    for parameter in filter(lambda p: p.requires_grad, model.parameters()):
        is_expert = parameter in dims_of_rows or ownership_of(parameter) is not None
        dims = dims_of_rows.get(parameter, parameter.ndim) - is_expert
        is_matrix = dims == 2 and parameter not in by_adamw
        decays = dims >= 2
        groups.setdefault((is_expert, is_matrix, decays), []).append(parameter)
    return [
        {"params": params, "orthogonalize": is_matrix, **({} if decays else {"weight_decay": 0.0})}
        for (_, is_matrix, decays), params in groups.items()
    ]
