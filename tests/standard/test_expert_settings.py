"""Every setting of experts is taken up by a recipe of one's own, or refused, or named as having no effect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import toolkit as tk
from tests.helpers import run_distributed
from toolkit.errors import UserError
from toolkit.lab.traces import TraceRecorder
from toolkit.moe.replan import Replan


def trained_kinds(folder: Path, groups: bool, settings: dict[str, Any]) -> list[type] | str:
    """The callbacks of `standard_trainer` for an MoE recipe that gives it none; or the text of its UserError."""
    given = {"experts": 4, "batch_size": 8, "planner": "swap", "record_traces": True, **settings}
    config = tk.MoERunConfig(run_dir=folder, tracker="none", cpu=True, **given)
    with tk.start_run("mine", config) as run:
        size = config.ep_size_in(run.world_size) if groups else 1
        model = nn.Sequential(nn.Linear(4, 8), tk.make_moe(8, 16, 4, 2, groups=tk.make_expert_groups(size)))
        table = tk.TensorTable(input=torch.randn(16, 4), label=torch.arange(16) % 4)
        try:
            trainer = tk.standard_trainer(run, tk.Classification(), model, train=table, test=table)
        except UserError as error:
            return str(error)
        return [type(callback) for callback in trainer.callbacks]


def test_the_callbacks_that_the_config_asks_for_are_added(tmp_path: Path):
    for kinds in run_distributed(trained_kinds, 2, tmp_path, True, {}):
        assert kinds.count(Replan) == kinds.count(TraceRecorder) == 1


@pytest.mark.parametrize(
    ("groups", "settings", "message"),
    [
        (False, {}, "--parallel-strategy expert_parallel: experts should be on 2 processes"),
        (True, {"spare_slots": 1}, "--spare-slots 1: the model has none"),
    ],
)
def test_a_model_that_was_built_otherwise_is_refused(
    tmp_path: Path, groups: bool, settings: dict[str, Any], message: str
):
    for answer in run_distributed(trained_kinds, 2, tmp_path, groups, settings):
        assert answer.startswith(message)


def test_settings_without_effect_on_one_process_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    trained_kinds(tmp_path, True, {"spare_slots": 1, "dense_parallel": "fsdp2"})
    lines = capsys.readouterr().out
    for notice in (
        "--planner swap: no effect",
        "--spare-slots 1: no effect",
        "--dense-parallel fsdp2: no effect on one process",
        "--balance-weight 0.007: no effect, because the task has no tk.RouterPenalty",
    ):
        assert notice in lines
