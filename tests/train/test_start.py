"""Facts, lines and warnings of a run before its first step, and its plots and placement at the end."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import toolkit as tk
from benchmarks.support.processes import run_distributed
from recipes import mnist_moe
from tests.support.trainers import standard_trainer
from toolkit.experts.layer.moe_layer import Experts
from toolkit.experts.parallel.groups import ExpertGroups
from toolkit.experts.placement.placement import ExpertPlacement
from toolkit.train.pictures import draw_run
from toolkit.train.start import count_parameters, describe_experts, describe_start, warnings_of

NO_EXPERTS = Experts({}, {})
TABLE = tk.TensorTable(input=torch.arange(64.0).view(16, 4), label=torch.arange(16) % 2)


def config(folder: Path, **settings: Any) -> tk.RunConfig:
    return tk.RunConfig(run_dir=folder, tracker="none", cpu=True, **settings)


def test_run_announces_device_data_parameters_and_steps(tmp_path, capsys):
    mnist_moe.main(mnist_moe.debug().replace(run_dir=tmp_path, tracker="none", cpu=True, max_steps=2))
    out = capsys.readouterr().out
    assert f"run folder {tmp_path}\n" in out
    assert "device      cpu, 1 process, float32\n" in out
    assert "data        digits, 1,442 training samples\n" in out
    # Stem 25,120, head 330, router 128, four experts of 2 * 32 * 32 weights, and top-2 routing.
    assert "parameters  33,770, of which a token uses 29,674\n" in out
    assert "steps       2 of 64 samples, 0.08696 epoch(s)\n" in out


@pytest.mark.parametrize(
    ("settings", "warns"), [({"warmup_steps": 20}, True), ({"warmup_epochs": 50}, True), ({}, False)]
)
def test_run_of_warmup_only_warns(tmp_path, settings, warns):
    with tk.start_run("toy", config(tmp_path, schedule=tk.ScheduleOptions(**settings))) as run:
        warnings = warnings_of(run, nn.Linear(1, 1), NO_EXPERTS, tk.Splits([], []), 10, max_steps=20)
    assert any("all 20 steps are warm-up" in warning for warning in warnings) is warns


def counts(ep_size: int) -> tuple[int, int | None]:
    groups = tk.experts.make_expert_groups(ep_size)
    moe = tk.experts.make_moe(8, 16, 4, 2, groups=groups, spare_slots=1 if ep_size > 1 else 0)
    model = nn.Sequential(nn.Linear(4, 8), moe)
    return count_parameters(model, Experts.of(model), 2)


def test_count_parameters_counts_each_expert_once_over_all_ranks():
    per_expert = 2 * 8 * 16
    rest = 4 * 8 + 8 + 4 * 8
    assert run_distributed(counts, 2, 2) == [(rest + 4 * per_expert, rest + 2 * per_expert)] * 2
    assert counts(1) == (rest + 4 * per_expert, rest + 2 * per_expert)
    assert count_parameters(nn.Linear(4, 8), NO_EXPERTS, 1) == (40, None)


@pytest.mark.parametrize(
    ("gpus", "num_processes", "hint"),
    [(4, None, " (one of 4 GPUs: --num-processes 4 uses all)"), (4, 1, ""), (1, None, "")],
)
def test_describe_start_names_unused_gpus(tmp_path, monkeypatch, gpus, num_processes, hint):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA L4")
    with tk.start_run("toy", config(tmp_path, num_processes=num_processes)) as run:
        run.device = torch.device("cuda")
        endless: Any = SimpleNamespace(endless=True, steps_per_epoch=1)
        expected = ("device", f"cuda ({gpus} x NVIDIA L4), 1 process, float32{hint}")
        assert describe_start(run, nn.Linear(4, 8), NO_EXPERTS, endless, 1)[0] == expected


def batch_norm_messages(folder: Path) -> tuple[str, str]:
    """Return the lines of a run with batch norm, and the error of torch with SyncBatchNorm on a CPU."""
    lines: list[str] = []
    for sync_bn in (False, True):
        with tk.start_run("toy", config(folder / str(sync_bn), batch_size=4, epochs=1, sync_bn=sync_bn)) as run:
            run.print = lines.append
            try:
                model = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))
                standard_trainer(run, tk.Classification(), model, train=TABLE, test=TABLE)
            except ValueError as error:
                return "\n".join(lines), str(error)
    return "\n".join(lines), ""


def test_batch_norm_on_two_processes_warns_and_sync_bn_converts(tmp_path):
    for lines, error in run_distributed(batch_norm_messages, 2, tmp_path / "two"):
        assert (
            "batch norm is over each process's part of the batch, unlike in one process: sync_bn=True has it" in lines
        )
        assert error == "SyncBatchNorm layers only work with GPU modules"
    assert "batch norm" not in batch_norm_messages(tmp_path / "one")[0]


def test_standard_trainer_draws_plots_at_the_end_of_the_run(tmp_path):
    with tk.start_run("toy", config(tmp_path / "run", epochs=1, batch_size=8, log_every=1)) as run:
        results = standard_trainer(run, tk.Classification(), tk.MLP(4, 2), train=TABLE, test=TABLE).fit()
        assert not list(run.folder.glob("*.png"))
        run.finish(results)
    assert [path.name for path in run.folder.glob("*.png")] == ["loss.png"]


def test_results_and_plot_have_the_placement_at_the_end(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        "toolkit.train.pictures.draw_experts", lambda _, experts, *__: drawn.append(experts.placement) or {}
    )
    layer = tk.experts.make_moe(4, 4, 4, 1, spare_slots=1)
    with tk.start_run("toy", config(tmp_path / "run")) as run:
        run.describe(**describe_experts(Experts.of(nn.ModuleDict({"block": layer})), ExpertGroups()))
        run.draw_at_finish(draw_run)
        assert run.facts["expert_placement"] == {"block": [[0, 1, 2, 3]]}
        layer.expert_stack.place(ExpertPlacement(((-1, 3, 1, 2, 0),)))
        run.finish({})
    results = json.loads((run.folder / "results.json").read_text())
    assert results["expert_placement"] == {"block": [[3, 1, 2, 0]]}
    assert drawn == [results["expert_placement"]]


def test_describe_experts_leaves_out_inactive_experts():
    layer = tk.experts.make_moe(4, 4, 4, 1)
    layer.router.register_buffer("active_E", torch.tensor([True, False, True, False]))
    facts = describe_experts(Experts.of(nn.ModuleDict({"block": layer})), ExpertGroups())
    assert facts["ep_size"] == 1
    assert facts["expert_placement"]() == {"block": [[0, 2]]}


def test_describe_experts_names_ranks_of_groups_that_are_not_neighbours():
    assert "ep_groups" not in describe_experts(NO_EXPERTS, ExpertGroups(ep_size=2))
    crossed = ExpertGroups(ep_size=2, partition=((0, 3), (1, 2)))
    assert describe_experts(NO_EXPERTS, crossed)["ep_groups"] == [[0, 3], [1, 2]]
