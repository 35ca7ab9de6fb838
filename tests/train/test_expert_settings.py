"""Expert settings of the config in a recipe with its own model and task: callbacks, warnings, errors and losses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import toolkit as tk
from benchmarks.support.processes import run_distributed
from tests.parity.models import RoutedExperts
from tests.support.trainers import standard_trainer
from toolkit.errors import UserError
from toolkit.experts.layer.moe_layer import Experts
from toolkit.experts.layer.router_options import RouterOptions
from toolkit.experts.moving.replan_options import ReplanOptions
from toolkit.experts.parallel.groups import ExpertGroups
from toolkit.integrations.peft.adapter_options import AdapterOptions
from toolkit.train.callbacks.expert_balance import BiasBalancing
from toolkit.train.callbacks.replan import Replan
from toolkit.train.callbacks.trace_recorder import TraceRecorder
from toolkit.train.models.moe import moe_from_config
from toolkit.train.start import warnings_of

TABLE = tk.TensorTable(input=torch.eye(4).repeat(125, 1), label=torch.arange(500) % 4)


def make_config(folder: Path, kind: Any = tk.MoERunConfig, **settings: Any) -> Any:
    defaults = {"experts": 4, "top_k": 1, "batch_size": 50}
    return kind(run_dir=folder, tracker="none", cpu=True, **defaults | settings)


def fit(config: Any, model: nn.Module, task: tk.Task | None = None) -> None:
    with tk.start_run("toy", config) as run:
        trainer = standard_trainer(run, task or tk.Classification(), model, train=TABLE, test=TABLE)
        run.finish(trainer.fit())


def start(folder: Path, group_size: int, **settings: Any) -> list[type] | str:
    """Return the types of the callbacks, or the text of the UserError."""
    config = make_config(folder, replan=ReplanOptions(planner="swap"), record_traces=True, batch_size=8, **settings)
    with tk.start_run("toy", config) as run:
        model = nn.Sequential(tk.experts.make_moe(4, 8, 4, 1, groups=tk.experts.make_expert_groups(group_size)))
        try:
            trainer = standard_trainer(run, tk.Classification(), model, train=TABLE, test=TABLE)
        except UserError as error:
            return str(error)
        finally:
            dist.barrier()  # another rank may still create a group
        return [type(callback) for callback in trainer.callbacks]


def start_on_four_ranks(folder: Path) -> tuple[Any, ...]:
    default = start(folder / "default", 4)
    replicated = start(folder / "replicated", 1)
    strided = start(folder / "strided", 2, ep_size=2, ep_stride=2)
    with tk.start_run("toy", make_config(folder / "seven", experts=7, batch_size=8)) as run:
        model = tk.experts.make_moe(4, 8, 7, 1, groups=run.expert_groups)
        return (
            default,
            replicated,
            strided,
            warnings_of(run, model, Experts.of(model), tk.Splits([], []), 10, max_steps=5),
        )


def test_config_adds_callbacks_and_expects_its_ep_groups(tmp_path: Path):
    for default, replicated, strided, (warning,) in run_distributed(start_on_four_ranks, 4, tmp_path):
        assert default.count(Replan) == default.count(TraceRecorder) == 1
        message = "ep_size=4: the model's experts are on 1 processes: build it with run.expert_groups"
        assert replicated.startswith(message)
        assert strided.startswith("ep_size=2: the model's experts are on 2 processes")
        assert warning.startswith("ep_size=1: every process has all experts, because 7 experts and 4 processes")


def test_moe_from_config_passes_settings_to_the_layer():
    options = {"router_score": "sigmoid", "routed_scaling": 2.0}
    places = {"experts": 4, "initial_placement": "round_robin", "spare_slots": 1}
    config = tk.MoERunConfig(**options, **places, capacity_factor=1.25, recompute="full")
    layer = moe_from_config(config, 8, groups=ExpertGroups(ep_size=2))
    assert layer.placement.slots == ((0, 2, -1), (1, 3, -1))
    assert layer.router.options == RouterOptions(**options)
    assert (layer.capacity_factor, layer.recompute) == (1.25, True)


class AdapterConfig(tk.ExpertRunConfig, AdapterOptions):
    """Config of fine-tuning with adapters."""


def summary(config: Any, *, top_expert: int | None) -> str:
    """Return the summary of a run whose tokens prefer `top_expert`, or each another expert."""
    model = tk.experts.make_moe(4, 8, 4, 1)
    rows = torch.eye(4) if top_expert is None else torch.ones(4, 4) * (torch.arange(4) == top_expert)[:, None]
    with torch.no_grad():
        model.router.weight.copy_(10 * rows)
    fit(config, model)
    return (config.run_dir / "summary.txt").read_text()


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ({}, "the balance loss has the weight 0.007: take more than balance_weight=0.007"),
        ({"balance": "none"}, "use balance='loss'"),
        ({"max_steps": 9}, "the balance loss has the weight 0.007: take more than balance_weight=0.007"),
        ({"balance_within": 50}, "the balance loss has the weight 0.035: take more than balance_weight=0.007"),
        ({"kind": AdapterConfig}, "routers are frozen: freeze_router=False trains them"),
        ({"kind": AdapterConfig, "freeze_router": False}, "give the task a RouterPenalty with a balance_weight"),
    ],
)
def test_summary_with_uneven_load_names_a_remedy(tmp_path: Path, settings: dict[str, Any], remedy: str):
    loads = "moe: the busiest expert has 4.0 times the mean load, the least busy 0.00 times"
    text = summary(make_config(tmp_path, lr=1e-6, **settings), top_expert=2)
    assert f"uneven load      {loads}; {remedy}\n" in text


@pytest.mark.parametrize(("top_expert", "settings"), [(None, {}), (2, {"max_steps": 7})])
def test_summary_with_even_load_or_few_tokens_has_no_remedy(top_expert: int | None, settings: Any, tmp_path: Path):
    assert "uneven load" not in summary(make_config(tmp_path, lr=1e-6, **settings), top_expert=top_expert)


class OwnTask:
    """Classification with the methods of a task only."""

    def __init__(self, router_losses: tk.experts.RouterPenalty | None = None):
        inner = tk.Classification()
        self.count, self.loss, self.evaluate = inner.count, inner.loss, inner.evaluate
        self.router_losses = router_losses


def test_own_task_trains_with_balance_loss_of_config_or_its_own_penalty(tmp_path: Path):
    def router_after(name: str, make_task: Callable[[Any], tk.Task], *, own: bool) -> Tensor:
        torch.manual_seed(0)
        model = tk.experts.make_moe(4, 8, 4, 1)
        task = make_task(tk.experts.RouterPenalty(model, balance_weight=0.0) if own else None)
        fit(make_config(tmp_path / f"{name} {own}", max_steps=3, balance_weight=1.0), model, task)
        return model.router.weight.detach()

    def classification(penalty: Any) -> tk.Task:
        return tk.Classification(penalty=penalty)

    of_config, own = (router_after("classification", classification, own=own) for own in (False, True))
    assert torch.equal(router_after("task", OwnTask, own=False), of_config)
    assert torch.equal(router_after("task", OwnTask, own=True), own)
    assert not torch.equal(own, of_config)


def test_settings_without_effect_on_layers_warn(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model = nn.Sequential(tk.experts.make_moe(4, 8, 4, 1), RoutedExperts(4, 4))
    tk.experts.shard_experts(model[1])
    with tk.start_run("toy", make_config(tmp_path, balance="bias", capacity_factor=1.5)) as run:
        standard_trainer(run, OwnTask(), model, train=TABLE, test=TABLE)
    out = capsys.readouterr().out
    assert "balance=bias: has no effect on 0, which was built with loss." in out
    assert "capacity_factor=1.5: has no effect on 0, which was built with None." in out
    assert "balance_weight, z_weight and capacity_factor: have no effect on 1.experts." in out


class Counter(nn.Module):
    """Counts training forward passes in a buffer that each pass replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.passes = self.passes + self.training
        return x


def test_step_balance_with_accumulation_updates_buffers_once_per_micro_batch(tmp_path: Path):
    def buffers_after_one_step(balance_weight: float) -> dict[str, Tensor]:
        model = nn.Sequential(nn.BatchNorm1d(4), Counter(), tk.experts.make_moe(4, 8, 4, 1))
        settings = {"batch_size": 12, "gradient_accumulation_steps": 3, "max_steps": 1}
        fit(make_config(tmp_path / str(balance_weight), balance_weight=balance_weight, **settings), model)
        return dict(model.named_buffers())

    balanced = buffers_after_one_step(0.5)
    assert balanced["0.num_batches_tracked"] == balanced["1.passes"] == 3
    for name, value in buffers_after_one_step(0.0).items():
        assert torch.equal(balanced[name], value), name


def test_bias_balancing_lowers_the_bias_of_overloaded_experts():
    layer = tk.experts.make_moe(4, 8, 4, 1, router=RouterOptions(balance="bias"))
    balancing = BiasBalancing(rate=0.1)
    balancing.on_init(SimpleNamespace(experts=Experts.of(layer)))
    with torch.no_grad():
        layer.router.weight.copy_(torch.eye(4))
    layer(torch.eye(4)[[2, 2, 2, 0]])
    balancing.on_before_optimizer_step(SimpleNamespace(run=SimpleNamespace(device=torch.device("cpu"))))
    assert layer.router.bias.tolist() == pytest.approx([0.0, 0.1, -0.1, 0.1])
