"""Recorded and replayed routes: choices, router gradients, activation checkpointing, rollouts and sharding."""

from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from benchmarks.speed.router_replay import (
    DIM,
    ROUTERS,
    MoEModel,
    gradients,
    kl,
    logits,
    make,
    perturb,
    router_parameters,
    taken_gradients,
    tokens,
)
from benchmarks.support.families import TINY_EXPERTS as EXPERTS
from benchmarks.support.families import build, config, randomize_routers
from benchmarks.support.precision import in_float64
from benchmarks.support.processes import run_distributed
from tests.integrations.peft.models import adapted
from tests.integrations.transformers.test_families import MOVED, PLACED, difference
from tests.integrations.transformers.training import enable_checkpointing
from toolkit.dynamic.dynamic_router import DynamicRouter
from toolkit.errors import UserError
from toolkit.experts.layer.moe_layer import make_moe
from toolkit.experts.layer.recompute import checkpoint
from toolkit.experts.moving.migrate import place_experts
from toolkit.experts.routing.routes import Routes
from toolkit.experts.sharding.router_replay import record_routes, replay_routes, route_hooks
from toolkit.integrations.accelerate.expert_parallel import ExpertParallel
from toolkit.integrations.transformers import causal_lm, recompute_blocks

FAMILIES = ("mixtral", "qwen3_moe", "deepseek_v3", "llama4_text", "dbrx", "gemma4_text")
"""Softmax after and before the choice, sigmoid with a bias and groups, weights at the input, fused tables, and
routers outside of the MoE layer."""


def recorded(model: nn.Module, ids: Tensor, replayed: Routes | None = None) -> Routes:
    """Return the routes of a forward pass without gradients, which replays `replayed` if given."""
    replay = nullcontext() if replayed is None else replay_routes(model, replayed)
    with torch.no_grad(), record_routes(model) as routes, replay:
        logits(model, ids)
    return routes


@pytest.mark.parametrize("name", [*ROUTERS, *FAMILIES])
def test_replay_routes_with_changed_weights_keeps_choices_and_trains_the_router(name: str) -> None:
    with in_float64():
        model, ids = make(name), tokens()
        plain = gradients(model, ids)
        with record_routes(model) as routes:
            torch.testing.assert_close(gradients(model, ids), plain, rtol=0, atol=0)
        with replay_routes(model, routes):
            torch.testing.assert_close(gradients(model, ids), plain, rtol=0, atol=0)

        served = logits(model, ids).detach()
        perturb(model)
        with record_routes(model) as own_routes:
            own = logits(model, ids)
        with replay_routes(model, routes), record_routes(model) as kept_routes:
            kept = logits(model, ids)
            kept.square().mean().backward()
        assert own_routes.flipped(routes) > 0
        assert kept_routes.flipped(routes) == 0
        assert kl(served, kept) < kl(served, own)
        assert all(p.grad is not None and p.grad.norm() > 0 for p in router_parameters(model))


@pytest.mark.parametrize("name", ["softmax", "mixtral"])
def test_copied_model_records_and_replays_separately(name: str) -> None:
    model, ids = make(name), tokens()
    with record_routes(model) as routes:
        logits(model, ids)
        copied = deepcopy(model)
        with record_routes(copied) as copied_routes:
            logits(copied, ids)
    assert len(routes) == len(copied_routes) == 1
    with replay_routes(model, routes):
        logits(copied, tokens(1))
        logits(model, ids)


# PEFT uses an older name of transformers.
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing. is deprecated:FutureWarning")
def test_replay_routes_with_adapters_keeps_choices() -> None:
    """Record in PEFT's wrappers; replay once adapters are rows of their experts."""
    model, ids = adapted("mixtral"), tokens()
    routes = recorded(model, ids)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    wrapped, _ = ExpertParallel(Accelerator(cpu=True)).prepare(model, optimizer)
    perturb(model)
    kept = recorded(wrapped, ids, routes)
    assert len(routes.layers) == len(kept.layers) == 2
    assert recorded(wrapped, ids).flipped(routes) > 0
    assert kept.flipped(routes) == 0


def recompute(model: Any, how: str) -> None:
    if isinstance(model, MoEModel):
        model.call = checkpoint if how == "regions" else partial(torch_checkpoint, use_reentrant=how == "reentrant")
    else:
        if how == "regions":
            recompute_blocks(model)
        else:
            enable_checkpointing(model, use_reentrant=how == "reentrant")
        model.train()
        model.enable_input_require_grads()


@pytest.mark.parametrize("how", ["plain", "reentrant", "regions"])
@pytest.mark.parametrize("name", ["softmax", "mixtral"])
def test_recomputed_forward_pass_repeats_its_routes(name: str, how: str) -> None:
    """Backward passes run after the end of the context, with a router that would make other choices."""
    found = []
    for recomputed in (False, True):
        model, steps = make(name), [tokens(0), tokens(1)]
        with torch.no_grad(), record_routes(model) as routes:
            for ids in steps:
                logits(model, ids)
        perturb(model)
        if recomputed:
            recompute(model, how)
        if how == "regions":
            with replay_routes(model, routes):
                losses = [logits(model, ids).square().mean() for ids in steps]
            for loss in losses:
                loss.backward()
        else:
            for step, ids in enumerate(steps):
                with replay_routes(model, routes[step]), record_routes(model) as kept:
                    loss = logits(model, ids).square().mean()
                loss.backward()
                assert len(kept) == 1
                assert kept.flipped(routes[step]) == 0
        found.append(taken_gradients(model))
    plain, recomputed = found
    assert plain.keys() == recomputed.keys()
    assert all(torch.allclose(recomputed[key], value, rtol=1e-5, atol=1e-8) for key, value in plain.items())


def test_plain_checkpointing_of_several_forward_passes_raises() -> None:
    model = make("mixtral")
    recompute(model, "plain")
    with record_routes(model):
        losses = [logits(model, tokens(step)).mean() for step in range(2)]
    with pytest.raises(UserError, match=r"Call backward after each forward pass, or .*replay_contexts"):
        losses[0].backward()


@pytest.mark.parametrize("how", ["plain", "regions"])
@pytest.mark.parametrize("name", ["softmax", "mixtral"])
def test_router_changed_before_the_backward_pass_keeps_its_choice(name: str, how: str) -> None:
    """Regions of a prepared model need no `record_routes`. One token uses two of four experts."""
    model = make(name)
    recompute(model, how)
    route_hooks(model)
    ids = tokens(0, 1)[:, :1]
    expected = recorded(model, ids)
    with record_routes(model) if how == "plain" else nullcontext():
        loss = logits(model, ids).square().mean()
    perturb(model, by=3)
    assert recorded(model, ids).flipped(expected) > 0
    loss.backward()
    stacked = [p.grad for key, p in model.named_parameters() if key.endswith(("experts.up", "experts.gate_up_proj"))]
    for grad, (ids_TK,) in zip(stacked, expected.layers, strict=True):
        assert grad.flatten(1).norm(dim=1).nonzero().flatten().tolist() == ids_TK[0].sort().values.tolist()


def test_rollout_of_vllm_is_replayed(tmp_path: Path) -> None:
    """vLLM returns arrays of all hidden layers, the first of which is dense, without the last token."""
    torch.manual_seed(0)
    model: Any = randomize_routers(causal_lm(config("deepseek_v3"))).eval()
    prompts, mask = tokens(0, 2)[:, :5], torch.ones(2, 9, dtype=torch.int64)
    mask[0, :2] = 0
    with torch.no_grad(), record_routes(model) as generated:
        ids = model.generate(prompts, attention_mask=mask[:, :5], max_new_tokens=4, min_new_tokens=4, use_cache=True)
    assert len(generated) == 4
    (first, second) = generated.to_rollout(mask)
    assert (first.shape, second.shape) == ((6, 1, 2), (8, 1, 2))
    served = [np.concatenate([np.zeros_like(array), array], axis=1).astype(np.uint8) for array in (first, second)]
    np.savez(tmp_path / "rollout.npz", *served)

    with np.load(tmp_path / "rollout.npz") as file:
        routes = Routes.from_rollout(list(file.values()), mask)
    with torch.no_grad():
        model.model.layers[1].mlp.gate.weight.normal_(generator=torch.Generator().manual_seed(1))
        with record_routes(model) as own:
            model(ids, attention_mask=mask)
        with record_routes(model) as replayed, replay_routes(model, routes):
            model(ids, attention_mask=mask)
    expected = Routes([routes.layers[1]])
    assert own.flipped(expected) > 0.3
    assert replayed.flipped(expected) == 0
    for array, found in zip((first, second), replayed.to_rollout(mask), strict=True):
        assert (found[:-1] == array).all()
        assert (found[-1] >= 0).all()


def test_replay_routes_routes_tokens_without_a_route() -> None:
    model, ids = make("sigmoid"), tokens(0, 2)
    mask = torch.ones(2, 10)
    mask[1, 7:] = 0
    routes = recorded(model, ids)
    perturb(model)
    own = recorded(model, ids)
    arrays = [array.astype(np.uint16) for array in routes.to_rollout(mask)]
    assert [array.shape for array in arrays] == [(10, 2, 2), (7, 2, 2)]
    arrays[0][3] = np.iinfo(np.uint16).max
    found = recorded(model, ids, Routes.from_rollout(arrays, mask))
    free = [3, 17, 18, 19]
    kept = [token for token in range(20) if token not in free]
    for layer, wanted in zip(found.layers, routes.layers, strict=True):
        assert torch.equal(layer[0][kept], wanted[0][kept])
    assert torch.equal(found.layers[0][0][free], own.layers[0][0][free])  # later layers have other inputs


def changed(routes: Routes, change: Callable[[Tensor], Tensor]) -> Routes:
    return Routes([[change(ids_TK.clone()) for ids_TK in calls] for calls in routes.layers])


def set_token(value: list[int]) -> Callable[[Routes], Routes]:
    """Return a function that sets the experts of token 4."""
    at, row = torch.tensor([4]), torch.tensor([value])
    return lambda routes: changed(routes, lambda ids_TK: ids_TK.index_copy_(0, at, row.to(ids_TK)))


@pytest.mark.parametrize(
    ("name", "change", "forwards", "message"),
    [
        ("mixtral", lambda routes: Routes(routes.layers * 2), 1, "layers, but . layers of the model have experts"),
        ("mixtral", lambda routes: changed(routes, lambda ids: ids[:-1]), 1, r"calls have \[29\]"),
        ("mixtral", lambda routes: changed(routes, lambda ids: ids[:, :1]), 1, "1 experts per token, .* takes 2"),
        ("softmax", set_token([0, 200]), 1, "up to expert 200, but layer .* takes 2 of"),
        ("mixtral", set_token([-1, 2]), 1, r"in a part of their places \(token 4: \[-1, 2\]\)\. Use -1"),
        ("mixtral", set_token([0, 0]), 1, r"have an expert twice.*token 4: \[0, 0\]"),
        ("mixtral", lambda routes: routes, 2, r"call 2 of layer .* has 30 tokens, but the recorded calls have \[30\]"),
        ("softmax", lambda routes: routes + routes, 1, "2 calls, but layer .* was called 1 times"),
    ],
)
def test_replay_routes_of_another_model_raises_and_keeps_the_model_usable(name, change, forwards, message):
    model, ids = make(name), tokens()
    with record_routes(model) as routes:
        expected = logits(model, ids)
    with pytest.raises(UserError, match=message), replay_routes(model, change(routes)):
        _ = [logits(model, ids) for _ in range(forwards)]
    with replay_routes(model, routes):
        assert torch.equal(logits(model, ids), expected)


def test_record_routes_of_models_without_routes_raises() -> None:
    dynamic = make_moe(DIM, 8, 4, 2, router_type=partial(DynamicRouter, active=2))
    for model, message in ((nn.Linear(2, 2), "no routers"), (dynamic, "DynamicRouter at '' cannot be replayed")):
        with pytest.raises(UserError, match=message), record_routes(model):
            pass


def test_replay_routes_raises_if_choices_cannot_be_kept_and_if_nested() -> None:
    ids = tokens()
    capacity = MoEModel(capacity_factor=1.0)
    for model, message in ((build("phimoe"), "does not choose by torch.topk"), (capacity, "capacity_factor")):
        routes = recorded(model, ids)
        perturb(model, by=3)
        with pytest.raises(UserError, match=message), replay_routes(model, routes):
            logits(model, ids)
    model = make("softmax")
    routes = recorded(model, ids)
    with replay_routes(model, routes):
        with pytest.raises(UserError, match="another one is active"), replay_routes(model, routes):
            pass
        model(ids)


def test_from_rollout_of_too_few_rows_or_of_floats_raises() -> None:
    with pytest.raises(UserError, match=r"routed_experts\[1\]: 1 rows for 4 tokens"):
        Routes.from_rollout([np.zeros((3, 1, 2), int), np.zeros((1, 1, 2), int)], torch.ones(2, 4))
    with pytest.raises(TypeError):
        Routes.from_rollout([np.zeros((3, 1, 2))] * 2, torch.ones(2, 4))


def replay_on_ranks(names: tuple[str, ...]) -> None:
    """Compare gradients and choices of replay, before and after a migration, with one process."""
    rank = dist.get_rank()
    for name in names:
        with in_float64():
            single, model, ids = make(name), make(name), tokens(0, 4)
            routes = recorded(single, ids)
            for each in (single, model):
                perturb(each)
            with replay_routes(single, routes):
                expected = gradients(single, ids)
            experts = ExpertParallel(Accelerator(cpu=True), ep_size=2, placement=lambda *_: PLACED)
            wrapped, optimizer = experts.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            held = dict(model.named_parameters())
            own_part = changed(routes, lambda ids_TK: ids_TK.chunk(2)[rank])
            for placement in (PLACED, MOVED):
                place_experts(model, placement, optimizer)
                with replay_routes(wrapped, own_part), record_routes(wrapped) as kept:
                    grads = gradients(wrapped, ids.chunk(2)[rank])
                grads = {key.removeprefix("module."): grad for key, grad in grads.items()}
                assert difference(grads, expected, held) < 1e-6, name
                assert kept.flipped(own_part) == 0, name
            loads = [2 * ids_TK.flatten().bincount(minlength=EXPERTS) for (ids_TK,) in own_part.layers]
            assert all(map(torch.equal, loads, [stack.log.load_E for stack in experts.stacks.values()])), name
            assert recorded(wrapped, ids.chunk(2)[rank]).flipped(own_part) > 0, name


def test_replay_on_two_processes_equals_one_before_and_after_migration() -> None:
    run_distributed(replay_on_ranks, 2, ("sigmoid", *FAMILIES[2:]))
