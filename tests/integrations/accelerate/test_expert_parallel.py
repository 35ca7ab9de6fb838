"""Metrics, output, checkpoints and errors of `ExpertParallel`. `tests/parity` tests its training."""

from __future__ import annotations

import contextlib
import io
import re
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, ParallelismConfig
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.support.accelerators import make_accelerator
from benchmarks.support.processes import ROOT, run_distributed
from tests.integrations.accelerate.toy import MIGRATING, Toy, ToyLoop, adamw, error_of, samples, sgd
from tests.parity.models import DIM, EXPERTS, TOP_K, Block
from tests.parity.outcome import Rows, gathered
from toolkit.errors import UserError
from toolkit.experts.layer.moe_layer import Experts, make_moe
from toolkit.experts.parallel.groups import make_expert_groups
from toolkit.experts.router_monitor import RouterMonitor
from toolkit.integrations.accelerate.expert_parallel import ExpertParallel


def output_dtypes() -> list[torch.dtype]:
    found = []
    for dense in ("ddp", "fsdp2"):
        accelerator = make_accelerator(dense, cpu=True, mixed_precision="bf16")
        loop = ToyLoop(model=Toy().float(), accelerator=accelerator)
        found.append(loop.model(torch.randn(4, 5)).dtype)
    return found


def test_outputs_under_mixed_precision_are_of_the_type_of_accelerate() -> None:
    assert run_distributed(output_dtypes, 2) == [[torch.float32, torch.bfloat16]] * 2


def names_of_metrics() -> set[str]:
    """Return the names of metrics of experts that are rebalanced and watched, with a capacity."""
    model = Toy()
    model.blocks[1] = Block(make_moe(DIM, 12, EXPERTS, TOP_K, capacity_factor=1.0)).double()
    loop = ToyLoop(model=model, replan=MIGRATING)
    monitor = RouterMonitor(loop.raw)
    names = {*loop.experts.metrics()}
    loop.train(range(4))
    names |= {*loop.experts.metrics(), *monitor.metrics()}
    return {re.sub(r"(load|trained|placement)/.*", r"\1/<layer>", name) for name in names}


def test_metrics_have_the_names_of_the_page() -> None:
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    listed: set[str] = set()
    for section in ("Expert load", "Routers", "Expert parallelism", "Rebalancing"):
        for row in re.findall(
            r"^\| (`.*?) \|", page.partition(f"## {section}\n")[2].partition("\n## ")[0], re.MULTILINE
        ):
            first, *others = re.findall("`(.*?)`", row)
            listed |= {first, *(first + name if name.startswith("_") else name for name in others)}
    found, other = run_distributed(names_of_metrics, 2)
    assert found == other == listed - {"moe/migration_bytes_per_step"}


def metrics_of_unequal_layers() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return placements, and metrics before training, after steps with and without the last layer, after more than are
    kept, and after none."""
    model = Toy()
    model.blocks[1].moe.experts = model.blocks[0].moe.experts
    model.blocks.append(Block(make_moe(DIM, 12, EXPERTS - 4, TOP_K)).double())
    handlers = [DistributedDataParallelKwargs(find_unused_parameters=True)]
    loop = ToyLoop(model=model, accelerator=Accelerator(cpu=True, kwargs_handlers=handlers))
    found = [loop.experts.metrics()]
    with mock.patch("toolkit.experts.expert_records.MOST_WAITING", 4):
        for steps in ([()], [(2,)], [(2,), (), (2,)] * 2):
            for skipped in steps:
                model.skipped = skipped
                loop.train([0])
            found.append(loop.experts.metrics())
    return Experts.of(loop.raw).on_ranks(), [*found, loop.experts.metrics()]


@pytest.mark.parametrize("world", [1, 2])
def test_metrics_of_unequal_layers_are_finite(world: int) -> None:
    ranks = run_distributed(metrics_of_unequal_layers, world)
    assert ranks == [ranks[0]] * world
    placements, (before, *after, last) = ranks[0]
    assert before == {f"moe/placement/{name}": rows for name, rows in placements.items() if world > 1}
    assert last == {}
    for metrics in after:
        assert sum(metrics["moe/load/blocks.0.moe.experts"]) == pytest.approx(1)
        assert ("moe/rank_load/blocks.0.moe.experts" in metrics) == ("moe/rank_imbalance" in metrics) == (world > 1)
        assert np.isfinite(np.concatenate([np.ravel(value) for value in metrics.values()])).all()
        assert metrics["moe/max_load_over_mean"] >= 1
        if world > 1:
            assert 1 <= metrics["moe/rank_imbalance"] <= world
            assert metrics["moe/rank_balancedness"] <= 1


def step_after_freezing() -> Rows:
    loop = ToyLoop(adamw, placement="replicas")
    loop.backward(samples())
    for parameter in loop.experts.sync.parameters:
        parameter.requires_grad_(False)
    loop.optimizers[0].step()
    return loop.weights()


def test_experts_frozen_with_a_gradient_equal_their_replicas() -> None:
    gathered(run_distributed(step_after_freezing, 2))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("distributed_type", DistributedType.DEEPSPEED),
        ("distributed_type", DistributedType.MEGATRON_LM),
        ("parallelism_config", ParallelismConfig(tp_size=2)),
    ],
)
def test_accelerator_that_shards_the_model_raises(name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(cpu=True)
    monkeypatch.setattr(Accelerator, name, value)
    with pytest.raises(UserError, match="accelerator: DeepSpeed"):
        ExpertParallel(accelerator)


def errors_of_fsdp_plugins() -> list[str]:
    return [
        error_of(ExpertParallel, make_accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(**options)))
        for options in (
            {"fsdp_version": 1},
            {"fsdp_version": 2, "cpu_offload": True},
            {"fsdp_version": 2, "activation_checkpointing": True},
        )
    ]


def test_unsupported_fsdp_plugin_raises() -> None:
    for version, offload, checkpointing in run_distributed(errors_of_fsdp_plugins, 2):
        assert version.startswith("fsdp_version: 1")
        assert offload.startswith("fsdp_offload_params: True")
        assert checkpointing.startswith("fsdp_activation_checkpointing: True")


def test_prepare_returns_objects_in_their_order_and_a_single_object_as_is() -> None:
    accelerator, model = Accelerator(cpu=True), Toy()
    optimizer, data = sgd(model), DataLoader(TensorDataset(torch.randn(4, 5)), 2)
    loader, prepared_optimizer, prepared = ExpertParallel(accelerator).prepare(data, optimizer, model)
    assert prepared is model
    assert prepared_optimizer.optimizer is optimizer
    assert [batch.shape for (batch,) in loader] == [(2, 5)] * 2
    other = Toy()
    assert ExpertParallel(accelerator).prepare(other) is other


def prepared_model(model: nn.Module) -> torch.optim.Optimizer:
    Accelerator(cpu=True).prepare_model(model, evaluation_mode=True)
    return adamw(model)


def stepped_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = adamw(model)
    model(samples()).sum().backward()
    optimizer.step()
    return optimizer


INVALID: dict[str, tuple[Any, str]] = {
    "prepared model": (prepared_model, "was prepared by accelerator.prepare"),
    "prepared optimizer": (lambda model: Accelerator(cpu=True).prepare(adamw(model)), "was prepared by accelerator"),
    "stepped optimizer": (stepped_optimizer, "it has stepped"),
    "optimizer of another model": (lambda _: sgd(nn.Linear(2, 2)), "not in the model"),
}


@pytest.mark.parametrize("case", INVALID)
def test_prepare_invalid_objects_raises_before_any_change(case: str) -> None:
    make_optimizer, message = INVALID[case]
    model = Toy()
    optimizer = make_optimizer(model)
    before = dict(vars(model.blocks[0].moe.experts))
    with pytest.raises(UserError, match=message):
        ExpertParallel(Accelerator(cpu=True)).prepare(model, optimizer)
    assert vars(model.blocks[0].moe.experts).keys() == before.keys()


def test_invalid_settings_and_calls_raise() -> None:
    loop = ToyLoop()
    accelerator = loop.accelerator
    calls = {
        "ep_size: 1 and groups": lambda: ExpertParallel(accelerator, ep_size=1, groups=make_expert_groups(1)),
        "ep_size=3": lambda: ToyLoop(ep_size=3),
        "save: it": lambda: ExpertParallel(accelerator).save("missing"),
        "prepare: it": lambda: loop.experts.prepare(Toy()),
        "norm_type: 1": lambda: accelerator.clip_grad_norm_(loop.raw.parameters(), 1.0, norm_type=1),
    }
    for message, call in calls.items():
        with pytest.raises(UserError, match=message):
            call()


def expert_id_error(placement: str, expert_id: int) -> str:
    moe = ToyLoop(placement=placement).raw.blocks[0].moe
    hidden = torch.randn(2, DIM, dtype=torch.float64)
    return error_of(moe.experts, hidden, torch.tensor([[0, 1], [2, expert_id]]), torch.ones(2, 2))


@pytest.mark.parametrize(("world", "placement", "expert_id"), [(1, "contiguous", -1), (2, "shuffled", EXPERTS)])
def test_invalid_expert_ids_raise(world: int, placement: str, expert_id: int) -> None:
    for message in run_distributed(expert_id_error, world, placement, expert_id):
        assert message.startswith(f"expert ids: {expert_id} in a layer of {EXPERTS} experts")


def test_prepare_prints_layers_by_their_number_of_experts(capfd: pytest.CaptureFixture[str]) -> None:
    ExpertParallel(Accelerator(cpu=True)).prepare(Toy())
    assert f"experts: 2 layers with {EXPERTS} experts, all on each rank." in capfd.readouterr().out


def prints_local_batch_norm() -> list[bool]:
    """Return whether `prepare` warns of batch norm, for a model with batch norm and for a model without."""
    found = []
    for norm in (nn.BatchNorm1d(DIM), nn.Identity()):
        model = Toy()
        model.head = nn.Sequential(norm.double(), model.head)
        with contextlib.redirect_stdout(io.StringIO()) as output:
            ToyLoop(model=model)
        found.append("batch norm is over each process's part of the batch, unlike in one process" in output.getvalue())
    return found


@pytest.mark.parametrize(("world", "expected"), [(1, [[False, False]]), (2, [[True, False], [False, False]])])
def test_prepare_prints_that_batch_norm_is_local(world: int, expected: list[list[bool]]) -> None:
    assert run_distributed(prints_local_batch_norm, world) == expected
