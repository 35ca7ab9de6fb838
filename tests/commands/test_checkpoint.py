"""`toolkit checkpoint`: what it shows is what was saved, and what it writes is what other ranks would have saved."""

import json
from pathlib import Path
from typing import get_args

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.checkpoint.test_checkpoint import assert_same, flip, ranks, trained
from tests.support.helpers import run_distributed
from tests.support.small_run import SmallModel
from toolkit.commands import main
from toolkit.experts.parallel.groups import ExpertGroups
from toolkit.experts.placement.placement import initial_placement
from toolkit.experts.placement.placement_options import InitialPlacement
from toolkit.experts.state import checkpoint_files, manifest


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    folder = tmp_path / "run" / "checkpoints" / "step-00000007"
    checkpoint_files.save(folder, *trained(), {"at": 7})
    return folder


def said_by(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main(["checkpoint", *map(str, words)]) == 0
    return capsys.readouterr().out


def refusal(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main(["checkpoint", *map(str, words)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    return error


def test_a_resharded_checkpoint_has_the_row_files_that_so_many_ranks_write(saved, tmp_path, capsys):
    run_distributed(ranks, 2, tmp_path / "two", 2, "save")
    said_by(capsys, "reshard", saved, tmp_path / "resharded", "--ep-size", 2)
    for file in ("experts-00000.safetensors", "experts-00001.safetensors"):
        theirs, ours = load_file(tmp_path / "two" / "step-00000007" / file), load_file(tmp_path / "resharded" / file)
        assert theirs.keys() == ours.keys()
        assert all(torch.equal(value, ours[key]) for key, value in theirs.items())
    theirs, ours = (manifest.read_manifest(tmp_path / name) for name in ("two/step-00000007", "resharded"))
    assert all(theirs[key] == ours[key] for key in ("rows", "placement", "world_size"))


@pytest.mark.parametrize("placement", ["contiguous", "round_robin", '{"num_experts": 4, "slots": [[2], [0, 3], [1]]}'])
def test_a_resharded_checkpoint_loads_without_a_difference(placement, saved, tmp_path, capsys):
    if placement.startswith("{"):
        (tmp_path / "placement.json").write_text(placement)
        placement = tmp_path / "placement.json"
    said_by(capsys, "reshard", saved, tmp_path / "out", "--ep-size", 3, "--placement", placement)
    assert len(list((tmp_path / "out").glob("experts-*"))) == 3
    now = trained(steps=0)
    assert checkpoint_files.load(tmp_path / "out", *now) == {"at": 7}
    assert_same(now, trained())


@pytest.mark.parametrize("kind", get_args(InitialPlacement))
def test_a_resharded_checkpoint_has_experts_where_a_new_run_has_them(kind, tmp_path, capsys):
    checkpoint_files.save(tmp_path / "in", *trained(experts=5))
    said_by(capsys, "reshard", tmp_path / "in", tmp_path / "out", "--ep-size", 2, "--placement", kind)
    facts = json.loads(said_by(capsys, "inspect", tmp_path / "out", "--json"))
    slots = initial_placement(5, 2, kind).slots
    assert facts["layers"]["moe.experts"]["slots"] == [list(row) for row in slots]
    now = trained(steps=0, experts=5)
    checkpoint_files.load(tmp_path / "out", *now)
    assert_same(now, trained(experts=5))


def test_an_exported_file_is_a_state_dict_with_experts_in_the_order_of_their_ids(saved, tmp_path, capsys):
    said_by(capsys, "reshard", saved, tmp_path / "shuffled", "--ep-size", 2, "--placement", "round_robin")
    said_by(capsys, "export", tmp_path / "shuffled", tmp_path / "out")
    model = SmallModel(ExpertGroups())
    model.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"))
    expected = trained()[0].state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


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


def test_inspect_shows_what_is_there_and_where_experts_are(saved, tmp_path, capsys):
    said_by(capsys, "reshard", saved, tmp_path / "out", "--ep-size", 2, "--placement", "round_robin")
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
    "no folder": ("verify {tmp}/nowhere", "nowhere does not exist"),
    "an empty folder": ("inspect {tmp}", "holds no checkpoint"),
    "a name in use": ("reshard {saved} {saved} --ep-size 2", "exists already"),
    "no ranks": ("reshard {saved} {tmp}/out --ep-size 0", "--ep-size 0: take one to 65536."),
    "too many ranks": ("reshard {saved} {tmp}/out --ep-size 99999999999", "--ep-size 99999999999: take one to 65536."),
    "a file for a folder": ("export {saved} {tmp}/p.json", "cannot be written, because {tmp}/p.json is no folder"),
    "a file far above": ("export {saved} {tmp}/p.json/x/y", "cannot be written, because {tmp}/p.json is no folder"),
    "no placement": ("reshard {saved} {tmp}/out --ep-size 2 --placement roundrobin", "--placement roundrobin: take"),
    "other ranks": ("reshard {saved} {tmp}/out --ep-size 2 --placement {tmp}/p.json", "4 experts on 1 rank(s), not"),
    "a type": ("export {saved} {tmp}/out --dtype float8", "unknown 'float8'"),
    "no experts": ("reshard {tmp}/dense {tmp}/out --ep-size 2", "has no experts to reshard"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_costs_one_sentence(case, saved, tmp_path, capsys):
    (tmp_path / "p.json").write_text('{"num_experts": 4, "slots": [[0, 1, 2, 3]]}')
    model = nn.Linear(2, 2)
    checkpoint_files.save(tmp_path / "dense", model, torch.optim.SGD(model.parameters()))
    words, said = BAD[case]
    assert said.format(tmp=tmp_path) in refusal(capsys, *words.format(tmp=tmp_path, saved=saved).split())
    assert not (tmp_path / "out").exists()
