"""A checkpoint goes to torch.distributed.checkpoint and back with the same bits; torch alone reads it."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from tests.checkpoint.test_checkpoint import OneRank, load, numbers, save, trained
from tests.support.helpers import run_distributed
from toolkit.checkpoint import checkpoint
from toolkit.commands.checkpoint import main
from toolkit.errors import UserError
from toolkit.experts.parallel.groups import make_expert_groups


def save_on_two(folder: Path) -> None:
    save(folder, trained(make_expert_groups(2)), 7)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two ranks, each with half of the experts."""
    folder = tmp_path_factory.mktemp("dcp") / "checkpoints"
    run_distributed(save_on_two, 2, folder)
    return folder / "step-00000007"


@pytest.fixture(scope="module")
def exported(saved: Path) -> Path:
    out = saved.parent.parent / "dcp"
    assert main(["export", str(saved), str(out), "--format", "dcp"]) == 0
    return out


def test_there_and_back_is_the_same_bits(saved: Path, exported: Path, tmp_path: Path, capsys):
    assert main(["import", str(exported), str(saved), str(tmp_path / "step-00000007")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'step-00000007'}: written\n"
    for file in saved.glob("*.safetensors"):
        before, after = load_file(file), load_file(tmp_path / "step-00000007" / file.name)
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before)
    ours, theirs = trained(steps=1), trained(steps=1)
    assert load(tmp_path / "step-00000007", ours) == load(saved, theirs)
    for (name, mine), (_, other) in zip(numbers(ours), numbers(theirs), strict=True):
        assert torch.equal(mine, other), name


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_alone_reads_it_into_a_whole_model(saved: Path, exported: Path):
    model, optimizer = trained(steps=1)
    load(saved, (model, optimizer))
    weights = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
    moments = {name: {"exp_avg": torch.zeros_like(p)} for name, p in model.named_parameters()}
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=exported, no_dist=True)
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert torch.equal(weights[name], tensor), name
    for name, parameter in model.named_parameters():
        assert torch.equal(moments[name]["exp_avg"], optimizer.state[parameter]["exp_avg"]), name


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_weights_alone_give_a_checkpoint_without_states(saved: Path, tmp_path: Path, capsys):
    model, _ = trained(steps=5)
    weights = {name: tensor.detach() for name, tensor in model.state_dict(keep_vars=True).items()}
    dcp.save({"model": weights}, checkpoint_id=tmp_path / "weights", no_dist=True)
    out = tmp_path / "step-00000007"
    assert main(["import", str(tmp_path / "weights"), str(saved), str(out)]) == 0
    assert "without optimizer states" in capsys.readouterr().out
    ours, optimizer = trained(steps=1)
    checkpoint.load_checkpoint(out, model=ours, optimizer=optimizer, run=OneRank())
    for name, tensor in ours.state_dict(keep_vars=True).items():
        assert torch.equal(tensor, weights[name]), name
    assert not optimizer.state_dict()["state"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"model": {"head.bias": torch.zeros(2)}}, "has 'model.head.bias' of shape (2,), which"),
        ({"model": {"other": torch.zeros(2)}}, "lacks 'model."),
    ],
)
def test_another_models_tensors_are_refused(saved: Path, tmp_path: Path, tensors: dict, said: str):
    dcp.save(tensors, checkpoint_id=tmp_path / "other", no_dist=True)
    with pytest.raises(UserError) as error:
        main(["import", str(tmp_path / "other"), str(saved), str(tmp_path / "out")])
    assert said in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("damage", [Path.unlink, lambda file: file.write_bytes(b"")])
def test_a_folder_that_lacks_its_tensors_is_refused(saved: Path, exported: Path, tmp_path: Path, damage: Any):
    source = shutil.copytree(exported, tmp_path / "dcp")
    for file in source.glob("*.distcp"):
        damage(file)
    with pytest.raises(UserError, match=r"dcp cannot be read \(.+\): copy it here again, with all its files\.$"):
        main(["import", str(source), str(saved), str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_what_is_no_dcp_folder_is_refused_and_types_are_kept(saved: Path, tmp_path: Path):
    for source in (saved, tmp_path / "nowhere"):
        with pytest.raises(UserError, match="cannot be read as a DCP folder"):
            main(["import", str(source), str(saved), str(tmp_path / "out")])
    (tmp_path / ".metadata").write_bytes(b"no pickle")
    with pytest.raises(UserError, match="cannot be read as a DCP folder"):
        main(["import", str(tmp_path), str(saved), str(tmp_path / "out")])
    with pytest.raises(UserError, match="--dtype bfloat16"):
        main(["export", str(saved), str(tmp_path / "out"), "--format", "dcp", "--dtype", "bfloat16"])
