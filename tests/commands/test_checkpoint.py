"""`toolkit checkpoint`: what it shows and writes is what was saved."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.checkpoint.test_checkpoint import flip, trained
from tests.support.helpers import run_distributed
from tests.support.small_run import SmallModel
from toolkit.commands import main
from toolkit.experts.moving.migrate import place_experts
from toolkit.experts.parallel.groups import ExpertGroups, make_expert_groups
from toolkit.experts.placement.placement import initial_placement
from toolkit.experts.state import checkpoint_files, manifest


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    folder = tmp_path / "run" / "checkpoints" / "step-00000007"
    checkpoint_files.save(folder, *trained(), {"at": 7})
    return folder


def save_apart(folder: Path) -> None:
    """On two ranks, whose experts are 0 and 2, 1 and 3."""
    model, optimizer = trained(make_expert_groups(2))
    place_experts(model, initial_placement(4, 2, "round_robin"), optimizer)
    checkpoint_files.save(folder, model, optimizer, {"at": 7})


def said_by(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main(["checkpoint", *map(str, words)]) == 0
    return capsys.readouterr().out


def refusal(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main(["checkpoint", *map(str, words)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    return error


def test_an_exported_file_is_a_state_dict_with_experts_in_the_order_of_their_ids(tmp_path, capsys):
    run_distributed(save_apart, 2, tmp_path / "apart")
    said_by(capsys, "export", tmp_path / "apart", tmp_path / "out")
    model = SmallModel(ExpertGroups())
    model.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"))
    expected = trained()[0].state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


def test_an_export_has_a_tied_head_under_its_own_name(tmp_path, capsys):
    model = nn.ModuleDict({"embedding": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
    model["head"].weight = model["embedding"].weight
    checkpoint_files.save(tmp_path / "in", model, torch.optim.SGD(model.parameters()))
    said_by(capsys, "export", tmp_path / "in", tmp_path / "out")
    weights = load_file(tmp_path / "out" / "model.safetensors")
    model.load_state_dict(weights)
    assert weights.keys() == {"embedding.weight", "head.weight"}


def test_an_export_in_another_type_leaves_whole_numbers_alone(tmp_path, capsys):
    model = nn.BatchNorm1d(3)
    checkpoint_files.save(tmp_path / "in", model, torch.optim.SGD(model.parameters()))
    said_by(capsys, "export", tmp_path / "in", tmp_path / "half.safetensors", "--dtype", "bfloat16")
    weights = load_file(tmp_path / "half.safetensors")
    assert weights.pop("num_batches_tracked").dtype == torch.int64
    assert {value.dtype for value in weights.values()} == {torch.bfloat16}


def test_verify_names_the_damaged_file(saved, capsys):
    assert ": 4 files, " in said_by(capsys, "verify", saved.parent.parent)
    flip(saved / "optimizer.safetensors", 100)
    assert "is damaged: optimizer.safetensors does not match its SHA-256" in refusal(capsys, "verify", saved)


@pytest.mark.parametrize("content", [b"", b"{}" * 20])
def test_inspect_names_a_file_that_is_no_tensors(content, saved, capsys):
    (saved / "model.safetensors").write_bytes(content)
    assert f"cannot be read: model.safetensors has {len(content)} bytes" in refusal(capsys, "inspect", saved)


def test_inspect_names_rows_that_no_file_holds(saved, capsys):
    about = manifest.read_manifest(saved)
    about["files"].pop("experts-00000.safetensors")
    manifest.write_canonical(saved / manifest.NAME, about | {"digest": manifest.digest(about)})
    assert f"checkpoint {saved} cannot be read: " in refusal(capsys, "inspect", saved)


def test_inspect_shows_what_is_there_and_where_experts_are(tmp_path, capsys):
    run_distributed(save_apart, 2, tmp_path / "out")
    said = said_by(capsys, "inspect", tmp_path / "out")
    assert "written by 2 process(es), format 1" in said
    assert "moe.experts: 4 experts on 2 rank(s): down float32[12, 16], up float32[12, 16], each with exp_avg" in said
    assert "  rank 0 | 0 2\n  rank 1 | 1 3\n" in said
    facts = json.loads(said_by(capsys, "inspect", tmp_path / "out", "--json"))
    assert facts["layers"]["moe.experts"]["slots"] == [[0, 2], [1, 3]]
    assert facts["files"]["state.json"] == (tmp_path / "out" / "state.json").stat().st_size


def test_inspect_knows_checkpoints_that_did_not_note_where_rows_were(saved, capsys):
    about = manifest.read_manifest(saved)
    del about["placement"]
    manifest.write_canonical(saved / manifest.NAME, about | {"digest": manifest.digest(about)})
    assert "  rank 0 | 0 1 2 3\n" in said_by(capsys, "inspect", saved)


BAD = {
    "a name in use": ("export {saved} {tmp}/half.safetensors", "exists already"),
    "no folder": ("verify {tmp}/nowhere", "nowhere does not exist"),
    "a file far above": ("export {saved} {tmp}/p.json/x/y", "cannot be written, because {tmp}/p.json is no folder"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_costs_one_sentence(case, saved, tmp_path, capsys):
    (tmp_path / "p.json").touch()
    (tmp_path / "half.safetensors").touch()
    words, said = BAD[case]
    assert said.format(tmp=tmp_path) in refusal(capsys, *words.format(tmp=tmp_path, saved=saved).split())
    assert not (tmp_path / "out").exists()
