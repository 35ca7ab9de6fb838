"""A run draws its plots when it ends, and reports the placement at its end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import toolkit as tk
from tests.support.trainers import standard_trainer
from toolkit.data.table import TensorTable
from toolkit.experts.parallel.groups import ExpertGroups
from toolkit.experts.placement.placement import ExpertPlacement
from toolkit.run.config.run import RunConfig
from toolkit.train.pictures import draw_run
from toolkit.train.start import describe_experts


def config(folder: Path) -> RunConfig:
    return RunConfig(run_dir=folder, tracker="none", cpu=True, epochs=1, batch_size=8, log_every=1)


def test_the_standard_trainer_leaves_pictures(tmp_path: Path):
    table = TensorTable(input=torch.randn(16, 4), label=torch.arange(16) % 2)
    with tk.start_run("toy", config(tmp_path / "run")) as run:
        trainer = standard_trainer(run, tk.Classification(), tk.MLP(4, 2), train=table, test=table)
        results = trainer.fit()
        assert not list(run.folder.glob("*.png")), "a run that is stopped and continued draws once, at its end"
        run.finish(results)
    assert [path.name for path in run.folder.glob("*.png")] == ["loss.png"]


def test_results_and_picture_show_where_experts_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    drawn = []
    monkeypatch.setattr(
        "toolkit.train.pictures.draw_experts", lambda _, experts, *__: drawn.append(experts.placement) or {}
    )
    layer = tk.experts.make_moe(4, 4, 4, 1, spare_slots=1)
    model = torch.nn.ModuleDict({"block": layer})
    with tk.start_run("toy", config(tmp_path / "run")) as run:
        run.describe(**describe_experts(model, ExpertGroups()))
        run.draw_at_finish(draw_run)
        assert run.facts["expert_placement"] == {"block": [[0, 1, 2, 3]]}
        layer.expert_stack.place(ExpertPlacement(((-1, 3, 1, 2, 0),)))
        run.finish({})
    written = json.loads((run.folder / "results.json").read_text())
    assert written["expert_placement"] == {"block": [[3, 1, 2, 0]]}
    assert drawn == [written["expert_placement"]]


def test_inactive_experts_are_not_in_the_placement():
    layer = tk.experts.make_moe(4, 4, 4, 1)
    layer.router.register_buffer("active_E", torch.tensor([True, False, True, False]))
    facts = describe_experts(torch.nn.ModuleDict({"block": layer}), ExpertGroups())
    assert facts["ep_size"] == 1
    assert facts["expert_placement"]() == {"block": [[0, 2]]}


def test_the_ranks_of_ep_groups_are_named_where_they_are_not_neighbours():
    assert "ep_groups" not in describe_experts(torch.nn.Linear(1, 1), ExpertGroups(ep_size=2))
    crossed = ExpertGroups(ep_size=2, partition=((0, 3), (1, 2)))
    assert describe_experts(torch.nn.Linear(1, 1), crossed)["ep_groups"] == [[0, 3], [1, 2]]
