"""A checkpoint goes to torch.distributed.checkpoint and back with the same bits; torch and Accelerate read it."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from accelerate.utils import merge_fsdp_weights
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from tests.checkpoint.test_checkpoint import OneRank, load, numbers, save, trained
from tests.support.helpers import run_distributed
from toolkit.checkpoint import checkpoint
from toolkit.commands.checkpoint import main
from toolkit.errors import UserError
from toolkit.experts.parallel.groups import make_expert_groups
from toolkit.experts.state import checkpoint_files


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
def test_torch_reads_it_into_the_state_dict_of_a_whole_model(saved: Path, exported: Path):
    expected, found = trained(steps=1), trained(steps=1)
    load(saved, expected)
    found[1].param_groups[0].update(lr=0.5, betas=(0.5, 0.5))
    load_by_torch(exported, *found)
    before, after = dict(numbers(expected)), dict(numbers(found))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    for mine, other in zip(found[1].param_groups, expected[1].param_groups, strict=True):
        assert mine | {"params": []} == other | {"params": []}


def load_by_torch(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """As torch's documentation says."""
    weights, states = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=folder, no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)


class Counting(torch.optim.SGD):
    """Keeps a Python number, as many optimizers do that are not torch's."""

    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["step"] = self.state[parameter].get("step", 0) + 1


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_tied_head_and_python_numbers_go_there_and_back(tmp_path: Path):
    def new(steps: int) -> tuple[nn.Module, Counting]:
        model = nn.ModuleDict({"embedding": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
        model["head"].weight = model["embedding"].weight
        optimizer = Counting(model.parameters())
        for _ in range(steps):
            optimizer.step()
        return model, optimizer

    pair, found = new(3), new(1)
    checkpoint_files.save(tmp_path / "in", *pair)
    assert main(["export", str(tmp_path / "in"), str(tmp_path / "dcp"), "--format", "dcp"]) == 0
    load_by_torch(tmp_path / "dcp", *found)
    assert main(["import", str(tmp_path / "dcp"), str(tmp_path / "in"), str(tmp_path / "out")]) == 0
    again = new(1)
    checkpoint_files.load(tmp_path / "out", *again)
    for model, optimizer in (found, again):
        assert torch.equal(model["head"].weight, pair[0]["head"].weight)
        assert [dict(state) for state in optimizer.state.values()] == [{"step": 3}]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_accelerate_merges_weights_into_the_state_dict_of_a_whole_model(saved: Path, tmp_path: Path):
    assert main(["export", str(saved), str(tmp_path / "dcp"), "--format", "dcp-weights"]) == 0
    merge_fsdp_weights(tmp_path / "dcp", tmp_path / "merged")
    merged, pair = load_file(tmp_path / "merged" / "model.safetensors"), trained(steps=1)
    load(saved, pair)
    weights = pair[0].state_dict()
    assert merged.keys() == weights.keys()
    assert all(torch.equal(merged[name], weights[name]) for name in weights)


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
