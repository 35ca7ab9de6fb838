"""`RouterMonitor` on one process, on a family of transformers that no other test has, and on our own layers."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.support.families import EXPERTS, TWO_LAYERS, build, moe_families, outputs, tiny_config, tokens
from benchmarks.support.processes import run_distributed
from tests.integrations.transformers.training import enable_checkpointing
from toolkit import UserError, experts
from toolkit.integrations.transformers import causal_lm

LAYER = "model.layers.0.mlp.experts"
NO_GRADIENT = "expert weights get no gradient"
UNKNOWN = {"doge", "jetmoe", "longcat_flash", "nllb-moe", "switch_transformers"}
"""Families whose experts cannot be sharded either."""


def flex_olmo(**settings: Any) -> Any:
    """Return a model with the auxiliary loss of transformers, unless `settings` differ."""
    torch.manual_seed(0)
    return causal_lm(tiny_config("flex_olmo", **TWO_LAYERS | {"output_router_logits": True} | settings)).train()


def train(model: Any, *, steps: int = 8, lr: float = 0.0) -> Iterator[int]:
    """Train, and yield the steps."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr)
    for step in range(1, steps + 1):
        ids = tokens(step, 4)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield step


def read(model: Any, **how: Any) -> tuple[dict[str, Any], list[str]]:
    """Return the metrics and findings of training steps."""
    monitor = experts.RouterMonitor(model)
    list(train(model, **how))
    values = monitor.metrics()
    monitor.close()
    return values, monitor.findings


def test_monitor_finds_experts_without_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    model = flex_olmo()
    router = model.model.layers[0].mlp.gate.weight.data
    router[[1, 3]] = -router[[0, 2]]  # two of these four have scores above 0
    router[[5, 7]] = 0
    monitor = experts.RouterMonitor(model)
    for step in train(model):
        if step % 4 == 0:
            values = monitor.metrics()
            assert monitor.findings == [f"{LAYER}: experts 5, 7 got no tokens in 4 steps."]
    assert values["moe/experts_without_tokens"] == 2
    assert [expert for expert, load in enumerate(values[f"moe/load/{LAYER}"]) if not load] == [5, 7]
    assert [expert for expert, share in enumerate(values[f"moe/trained/{LAYER}"]) if not share] == [5, 7]
    assert capsys.readouterr().out.count("got no tokens") == 1


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"output_router_logits": False}, "router logits are not returned (output_router_logits=False)"),
        ({"router_aux_loss_coef": 0.0}, "its coefficient is 0 (router_aux_loss_coef)"),
        ({}, None),
    ],
)
def test_monitor_tells_whether_an_auxiliary_loss_acts(settings: dict[str, Any], reason: str | None) -> None:
    values, findings = read(flex_olmo(**settings))
    assert findings == ([] if reason is None else [f"the auxiliary loss does not act: {reason}."])
    assert (values["moe/aux_gradient_ratio"] > 0) == (reason is None)


def test_monitor_tells_that_routers_are_frozen() -> None:
    model = flex_olmo()
    for layer in model.model.layers:
        layer.mlp.gate.requires_grad_(False)
    values, findings = read(model)
    assert findings == ["the auxiliary loss does not act: the routers are frozen."]
    assert "moe/aux_gradient_ratio" not in values


@pytest.mark.parametrize("checkpointing", [False, True])
def test_aux_gradient_ratio_equals_separate_backward_passes(checkpointing: bool) -> None:
    model = flex_olmo(num_hidden_layers=1, router_aux_loss_coef=0.5)
    weight = model.model.layers[0].mlp.gate.weight
    norms = []
    ids = tokens(1, 4)
    found = model(input_ids=ids, labels=ids)
    for loss in (0.5 * found.aux_loss, found.loss - 0.5 * found.aux_loss):
        norms.append(torch.autograd.grad(loss, weight, retain_graph=True)[0].norm())
    if checkpointing:
        enable_checkpointing(model, use_reentrant=False)
    values, _ = read(model, steps=1)
    assert values["moe/aux_gradient_ratio"] == pytest.approx(float(norms[0] / norms[1]), rel=1e-4)


def test_monitor_sees_the_losses_of_router_penalty() -> None:
    torch.manual_seed(0)
    layer = experts.make_moe(8, 12, EXPERTS, 2)
    monitor, ratios = experts.RouterMonitor(layer), []
    penalty = experts.RouterPenalty(layer, balance_weight=0.1, z_weight=0.01)
    optimizer = torch.optim.SGD(layer.parameters(), 0.0)
    for weight in (0.0, 1.0, 2.0):
        x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
        loss, auxiliary = layer(x).square().sum(), penalty()
        assert auxiliary is not None
        (loss + weight * auxiliary).backward()
        optimizer.step()
        optimizer.zero_grad()
        ratios.append(monitor.metrics()["moe/aux_gradient_ratio"])
    assert ratios[0] == 0
    assert ratios[2] == pytest.approx(2 * ratios[1], rel=1e-4) != 0


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # raised by PEFT
@pytest.mark.parametrize("targets", [{}, {"target_parameters": ["mlp.experts.gate_up_proj"]}])
def test_monitor_finds_adapters_that_train_no_expert(targets: dict[str, Any]) -> None:
    from peft import LoraConfig, get_peft_model

    model: Any = get_peft_model(flex_olmo(), LoraConfig(r=2, target_modules=["q_proj"], **targets))
    values, findings = read(model)
    shares = values[f"moe/trained/base_model.model.{LAYER}" + (".base_layer" if targets else "")]
    if targets:
        assert all(0 < share < 0.5 for share in shares)
        assert not any(NO_GRADIENT in finding for finding in findings)
    else:
        assert shares == [0.0] * EXPERTS
        assert f"{NO_GRADIENT}: no adapter targets them." in findings
        assert values["moe/untrained_experts"] == 2 * EXPERTS


def test_monitor_of_a_dense_model_raises() -> None:
    with pytest.raises(UserError, match="model='Linear': has no experts, take an MoE model"):
        experts.RouterMonitor(nn.Linear(2, 2))


@pytest.mark.parametrize("family", sorted({*moe_families()} - UNKNOWN))
def test_monitor_counts_the_tokens_of_every_family(family: str) -> None:
    model = build(family)
    monitor = experts.RouterMonitor(model)
    ids = tokens(0, 2)
    outputs(model, ids).float().sum().backward()
    torch.optim.SGD(model.parameters(), 0.0).step()
    loads = [load for name, load in monitor.metrics().items() if name.startswith("moe/load/")]
    assert loads
    assert all(sum(load) == pytest.approx(1) for load in loads)


def train_with_and_without() -> list[Any]:
    """Return the weights of training under DDP with and without a monitor, and its metrics."""
    found: list[Any] = []
    for watched in (False, True):
        model: Any = DistributedDataParallel(flex_olmo())
        monitor = experts.RouterMonitor(model) if watched else None
        for step in train(model, lr=0.1):
            if monitor is not None and step % 4 == 0:
                found.append(monitor.metrics())
        found.append([parameter.detach() for parameter in model.parameters()])
    return found


def test_monitor_changes_nothing_under_ddp() -> None:
    expected = experts.RouterMonitor(model := flex_olmo())
    alone = [expected.metrics() for step in train(model, lr=0.1) if step % 4 == 0]
    for without, *metrics, watched in run_distributed(train_with_and_without, 2):
        assert all(map(torch.equal, watched, without))
        for values, one in zip(metrics, alone, strict=True):  # both ranks have the batches of the one process
            assert values == {name: pytest.approx(value, rel=1e-4) for name, value in one.items()}
