"""`toolkit checkpoint inspect` and `toolkit checkpoint export`."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from benchmarks.support.processes import run_distributed
from tests.checkpoint.test_checkpoint import flip, trained
from tests.support.small_run import SmallModel
from toolkit.commands import main
from toolkit.experts.moving.migrate import place_experts
from toolkit.experts.parallel.groups import ExpertGroups, make_expert_groups
from toolkit.experts.placement.placement import initial_placement
from toolkit.experts.state import checkpoint_files


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    folder = tmp_path / "run" / "checkpoints" / "step-00000007"
    checkpoint_files.save(folder, *trained(), {"at": 7})
    return folder


def save_sharded(folder: Path) -> None:
    """Save with experts 0 and 2 on rank 0, and 1 and 3 on rank 1."""
    model, optimizer = trained(make_expert_groups(2))
    place_experts(model, initial_placement(4, 2, "round_robin"), optimizer)
    checkpoint_files.save(folder, model, optimizer, {"at": 7})


def output_of(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main(["checkpoint", *map(str, words)]) == 0
    return capsys.readouterr().out


def test_inspect_and_export_of_sharded_experts(tmp_path, capsys):
    run_distributed(save_sharded, 2, tmp_path / "sharded")
    printed = output_of(capsys, "inspect", tmp_path / "sharded")
    assert "world size 2, format 1" in printed
    for name in ("up", "down"):
        assert f"moe.experts.{name}: 4 x float32[1, 12, 16], each with exp_avg, exp_avg_sq, step\n" in printed
    assert "\n  rank 0 | 0 2\n  rank 1 | 1 3\n" in printed
    output_of(capsys, "export", tmp_path / "sharded", tmp_path / "out")
    model = SmallModel(ExpertGroups())
    model.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"))
    expected = trained()[0].state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


def test_export_keeps_tied_names_and_casts_only_floats(tmp_path, capsys):
    model = nn.ModuleDict({"embedding": nn.Embedding(5, 3), "norm": nn.BatchNorm1d(3), "head": nn.Linear(3, 5, False)})
    model["head"].weight = model["embedding"].weight
    checkpoint_files.save(tmp_path / "in", model, torch.optim.SGD(model.parameters()))
    output_of(capsys, "export", tmp_path / "in", tmp_path / "half.safetensors", "--dtype", "bfloat16")
    weights = load_file(tmp_path / "half.safetensors")
    model.load_state_dict(weights)
    assert weights.keys() == model.state_dict().keys()
    assert weights.pop("norm.num_batches_tracked").dtype == torch.int64
    assert {value.dtype for value in weights.values()} == {torch.bfloat16}


def test_inspect_of_a_save_state_folder(tmp_path, capsys):
    checkpoint_files.save(tmp_path / "state" / "experts_0", *trained(), {"at": 7})
    assert "moe.experts.up: 4 x float32" in output_of(capsys, "inspect", tmp_path / "state")
    checkpoint_files.save(tmp_path / "state" / "experts_1", *trained(), {"at": 7})
    assert main(["checkpoint", "inspect", str(tmp_path / "state")]) == 2
    assert "holds 2 models, experts_0, experts_1" in capsys.readouterr().err


def test_inspect_and_audit_report_a_damaged_file(saved, capsys):
    assert main(["audit", str(saved.parent.parent)]) == 0
    flip(saved / "optimizer.safetensors", 100)
    assert main(["checkpoint", "inspect", str(saved)]) == 2
    assert "is damaged: optimizer.safetensors does not match its SHA-256" in capsys.readouterr().err
    assert main(["audit", str(saved)]) == 1
    out = capsys.readouterr().out
    assert "files: optimizer.safetensors does not match its SHA-256" in out
    assert "NaN" not in out


@pytest.mark.parametrize(
    ("words", "message"),
    [("export {saved} {saved}/model.safetensors", "exists already"), ("inspect nowhere", "not exist")],
)
def test_existing_target_or_missing_checkpoint_raises(words, message, saved, capsys):
    assert main(["checkpoint", *words.format(saved=saved).split()]) == 2
    assert message in capsys.readouterr().err
