"""Every setting of experts is taken up by a recipe of one's own, or refused, or named as having no effect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import toolkit as tk
from benchmarks.support.processes import run_distributed
from tests.support.trainers import standard_trainer
from toolkit.errors import UserError
from toolkit.experts.layer.stack import ExpertStack
from toolkit.experts.moving.replan_options import ReplanOptions
from toolkit.experts.parallel.groups import ExpertGroups
from toolkit.experts.placement.placement import contiguous
from toolkit.integrations.peft.adapter_options import AdapterOptions
from toolkit.train.callbacks.replan import Replan
from toolkit.train.callbacks.trace_recorder import TraceRecorder
from toolkit.train.start import warnings_of


def trained_kinds(folder: Path, groups: bool, settings: dict[str, Any]) -> list[type] | str:
    """The callbacks of `standard_trainer` for an MoE recipe that gives it none; or the text of its UserError."""
    given = {"experts": 4, "batch_size": 8, "replan": ReplanOptions(planner="swap"), "record_traces": True, **settings}
    config = tk.MoERunConfig(run_dir=folder, tracker="none", cpu=True, **given)
    with tk.start_run("mine", config) as run:
        size = config.ep_size_in(run.world_size) if groups else 1
        model = nn.Sequential(
            nn.Linear(4, 8), tk.experts.make_moe(8, 16, 4, 2, groups=tk.experts.make_expert_groups(size))
        )
        table = tk.TensorTable(input=torch.randn(16, 4), label=torch.arange(16) % 4)
        try:
            trainer = standard_trainer(run, tk.Classification(), model, train=table, test=table)
        except UserError as error:
            if torch.distributed.is_initialized():
                torch.distributed.barrier()  # another rank may be on its way into a group yet
            return str(error)
        return [type(callback) for callback in trainer.callbacks]


def test_the_callbacks_that_the_config_asks_for_are_added(tmp_path: Path):
    for kinds in run_distributed(trained_kinds, 2, tmp_path, True, {}):
        assert kinds.count(Replan) == kinds.count(TraceRecorder) == 1


@pytest.mark.parametrize(
    ("world", "groups", "settings", "message"),
    [
        (2, False, {}, "ep_size=2: the model's experts are on 1 processes: build it with run.expert_groups"),
        (4, True, {"ep_size": 2, "ep_stride": 2}, "ep_size=2: the model's experts are on 2 processes"),
    ],
)
def test_a_model_that_was_built_otherwise_is_refused(
    tmp_path: Path, world: int, groups: bool, settings: dict[str, Any], message: str
):
    for answer in run_distributed(trained_kinds, world, tmp_path, groups, settings):
        assert answer.startswith(message)


def said_of_seven_experts(folder: Path) -> list[str]:
    config = tk.MoERunConfig(run_dir=folder, tracker="none", cpu=True, experts=7, batch_size=8)
    with tk.start_run("mine", config) as run:
        moe = tk.experts.make_moe(8, 16, 7, 2, groups=run.expert_groups)
        return warnings_of(run, moe, tk.Splits([], []), 10, max_steps=5)


def test_warnings_of_experts_that_ranks_cannot_share(tmp_path: Path):
    for said in run_distributed(said_of_seven_experts, 2, tmp_path):
        (note,) = said
        assert note.startswith("ep_size=1: every process has all experts, because 7 experts and 2 processes")


class AdapterConfig(tk.ExpertRunConfig, AdapterOptions):
    """Of a run that fine-tunes a mixture."""


def summary(
    folder: Path, top_expert: int | None, kind: type[tk.ExpertRunConfig] = tk.MoERunConfig, **settings: Any
) -> str:
    """The summary of an epoch whose tokens all prefer one expert, or are spread by the order of their samples."""
    config = kind(
        run_dir=folder, tracker="none", cpu=True, **{"experts": 4, "top_k": 1, "batch_size": 50, "lr": 1e-6, **settings}
    )
    with tk.start_run("mine", config) as run:
        moe = tk.experts.make_moe(4, 8, 4, 1)
        rows = torch.eye(4) if top_expert is None else torch.ones(4, 4) * (torch.arange(4) == top_expert)[:, None]
        with torch.no_grad():
            moe.router.weight.copy_(10 * rows)
        table = tk.TensorTable(input=torch.eye(4).repeat(125, 1), label=torch.arange(500) % 4)
        trainer = standard_trainer(run, tk.Classification(), moe, train=table, test=table)
        run.finish(trainer.fit())
    return (folder / "summary.txt").read_text()


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
def test_an_uneven_load_is_a_line_of_the_summary_with_a_remedy(tmp_path: Path, settings: dict[str, Any], remedy: str):
    said = "moe: the busiest expert has 4.0 times the mean load, the least busy 0.00 times"
    assert f"uneven load      {said}; {remedy}\n" in summary(tmp_path, 2, **settings)


def test_an_even_load_is_no_line_of_the_summary(tmp_path: Path):
    assert "uneven load" not in summary(tmp_path, None)


def test_too_few_assignments_are_not_judged(tmp_path: Path):
    assert "uneven load" not in summary(tmp_path, 2, max_steps=7)


class OwnTask:
    """A task without anything that `tk.fit` could adapt."""

    def count(self, batch: dict[str, torch.Tensor]) -> int:
        return len(batch["label"])

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> tk.Loss:
        logits = model(batch["input"])
        return tk.Loss(nn.functional.cross_entropy(logits, batch["label"], reduction="sum"), len(batch["label"]))

    evaluate = loss


class PenalisedTask(OwnTask):
    """Has the router losses of another weight than the config's."""

    def __init__(self, model: nn.Module):
        self.balance = tk.experts.RouterPenalty(model, balance_weight=0.0)


def router_after(folder: Path, make_task: Any) -> torch.Tensor:
    config = tk.MoERunConfig(
        run_dir=folder, tracker="none", cpu=True, experts=4, batch_size=10, max_steps=3, balance_weight=1.0
    )
    with tk.start_run("mine", config) as run:
        model = tk.experts.make_moe(4, 8, 4, 1)
        table = tk.TensorTable(input=torch.eye(4).repeat(10, 1), label=torch.arange(40) % 4)
        tk.fit(
            run,
            make_task(model),
            model,
            tk.build_optimizer(model, config),
            tk.Splits(table, table),
        )
        return model.router.weight.detach().clone()


def test_fit_own_task_is_trained_with_the_balance_loss_of_the_config(tmp_path: Path):
    usual = router_after(tmp_path / "usual", lambda _: tk.Classification())
    assert torch.equal(router_after(tmp_path / "own", lambda _: OwnTask()), usual)
    without = router_after(tmp_path / "penalised", PenalisedTask)
    assert not torch.equal(without, usual)
    assert torch.equal(
        without,
        router_after(
            tmp_path / "own penalty",
            lambda model: tk.Classification(penalty=tk.experts.RouterPenalty(model, balance_weight=0.0)),
        ),
    )


def test_fit_names_settings_that_the_layers_do_not_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    own = nn.Module()
    own.up = nn.Parameter(torch.randn(4, 4, 4))
    own.forward = lambda x: torch.einsum("td,edf->tf", x, own.up)
    own.expert_stack = ExpertStack({"up": own.up}, contiguous(4, 1), ExpertGroups())
    model = nn.Sequential(tk.experts.make_moe(4, 8, 4, 1), own)
    config = tk.MoERunConfig(
        run_dir=tmp_path, tracker="none", cpu=True, experts=4, batch_size=10, balance="bias", capacity_factor=1.5
    )
    with tk.start_run("mine", config) as run:
        table = tk.TensorTable(input=torch.eye(4).repeat(10, 1), label=torch.arange(40) % 4)
        standard_trainer(run, OwnTask(), model, train=table, test=table)
    said = capsys.readouterr().out
    assert "--balance bias: has no effect on 0, which was built with loss." in said
    assert "--capacity-factor 1.5: has no effect on 0, which was built with None." in said
    assert "balance_weight, z_weight and capacity_factor: have no effect on 1." in said


class Counter(nn.Module):
    """Counts its training forward passes in a buffer that each pass replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes = self.passes + self.training
        return x


def buffers_after_one_step(folder: Path, balance_weight: float) -> dict[str, torch.Tensor]:
    config = tk.MoERunConfig(
        run_dir=folder,
        tracker="none",
        cpu=True,
        experts=4,
        batch_size=12,
        gradient_accumulation_steps=3,
        max_steps=1,
        balance_weight=balance_weight,
    )
    with tk.start_run("mine", config) as run:
        model = nn.Sequential(nn.BatchNorm1d(4), Counter(), tk.experts.make_moe(4, 8, 4, 1))
        table = tk.TensorTable(input=torch.randn(12, 4), label=torch.arange(12) % 4)
        standard_trainer(run, tk.Classification(), model, train=table, test=table).fit()
        return dict(model.named_buffers())


def test_whole_step_balance_with_accumulation_updates_buffers_once_per_micro_batch(tmp_path: Path):
    balanced = buffers_after_one_step(tmp_path / "balanced", 0.5)
    assert balanced["0.num_batches_tracked"] == balanced["1.passes"] == 3
    for name, value in buffers_after_one_step(tmp_path / "free", 0.0).items():
        assert torch.equal(balanced[name], value), name
