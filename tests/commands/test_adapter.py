"""`toolkit adapter verify` names each of twelve faults that users of other stacks reported, and none in good files."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.integrations.peft.faults import (
    MATRICES,
    SETTINGS,
    WEIGHTS,
    drop_from_merged,
    experts_of,
)
from tests.integrations.peft.models import config
from tests.integrations.transformers.families import EXPERTS, awaken, tokens
from tests.support.helpers import run_distributed
from toolkit.commands import main
from toolkit.integrations.transformers import causal_lm, save_pretrained

FAMILY = "olmoe"


def trained(folder: Path, shared: bool) -> None:
    """A few steps on two processes; not `shared`: each then has its own adapters of attention."""
    from accelerate import Accelerator
    from peft import LoraConfig, get_peft_model

    from toolkit.integrations.accelerate.expert_parallel import ExpertParallel
    from toolkit.integrations.peft.merged_weights import save_merged

    torch.manual_seed(0)
    settings = LoraConfig(r=4, lora_alpha=64, target_modules=["q_proj"], target_parameters=MATRICES)
    model: Any = get_peft_model(causal_lm(folder / "base"), settings)
    optimizer: Any = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    accelerator: Any = Accelerator(cpu=True)
    wrapped, optimizer = ExpertParallel(accelerator).prepare(model, optimizer)
    for step in range(2):
        ids = tokens(step + 7 * accelerator.process_index, 16)
        accelerator.backward(wrapped(input_ids=ids, labels=ids).loss)
        optimizer.step()
        optimizer.zero_grad()
    if not shared and accelerator.process_index == 1:  # the engine would refuse to train them so
        for name, parameter in model.named_parameters():
            if "q_proj.lora" in name:
                parameter.data += 0.1
    save_pretrained(wrapped, folder / ("adapter" if shared else "each its own"))
    if shared:
        save_merged(wrapped, folder / "merged")
        model.base_model.model.lm_head.requires_grad_(True)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            save_pretrained(wrapped, folder / "with its base")
        of_base = [str(each.message) for each in said if "of the base are trained" in str(each.message)]
        assert len(of_base) == (accelerator.process_index == 0)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    torch.manual_seed(3)
    awaken(causal_lm(config(FAMILY))).save_pretrained(folder / "base")
    run_distributed(trained, 2, folder, True)
    run_distributed(trained, 2, folder, False)
    return folder


def verify(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = main(["adapter", "verify", *map(str, words)])
    said = capsys.readouterr()
    return code, said.out, said.err


def faulty(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved / "adapter", tmp_path / "faulty")
    return tmp_path / "faulty"


def test_verify_of_saved_adapters_finds_no_fault(saved: Path, capsys: pytest.CaptureFixture[str]):
    code, out, err = verify(capsys, saved / "adapter", "--merged", saved / "merged")
    assert code == 0
    assert "fault" not in err
    assert "no fault found" in out
    assert "written by PEFT" in out
    assert "model.layers.1.mlp.experts.down_proj: 8 experts, norms from" in out
    assert "merged and unmerged logits agree" in out
    assert f"{saved / 'merged'} gives these logits" in out


def test_verify_of_unchanged_experts_names_them_without_fault(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = faulty(saved, tmp_path)
    (folder / "adapter_record.json").unlink()  # as another program saves it
    tensors = load_file(folder / "adapter_model.safetensors")
    for name in experts_of(tensors, "lora_B"):
        tensors[name].view(len(tensors[name]), -1, EXPERTS)[..., 5] = 0
    save_file(tensors, folder / "adapter_model.safetensors")
    code, out, err = verify(capsys, folder, "--base", saved / "base")
    assert code == 0
    assert "fault" not in err
    assert "never changed: expert(s) 5" in out


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("adapter_config.json", "[1"),
        ("adapter_config.json", "[]"),
        ("adapter_config.json", '{"peft_version": 3}'),
        ("adapter_record.json", "[]"),
        ("adapter_model.safetensors", "cut"),
    ],
)
def test_verify_of_damaged_files_names_the_folder(
    name: str, text: str, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = faulty(saved, tmp_path)
    (folder / name).write_text(text)
    code, _, err = verify(capsys, folder)
    assert code == 2
    assert err.splitlines()[-1].startswith(("error: ", "fault: "))


@pytest.mark.parametrize("name", WEIGHTS)
def test_verify_of_faulty_weights_names_the_fault(
    name: str, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder, (fault, words) = faulty(saved, tmp_path), WEIGHTS[name]
    tensors = load_file(folder / "adapter_model.safetensors")
    fault(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")
    code, _, err = verify(capsys, folder)
    assert code == 2
    assert words in err


@pytest.mark.parametrize("name", SETTINGS)
def test_verify_of_faulty_settings_names_the_fault(
    name: str, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder, (change, words) = faulty(saved, tmp_path), SETTINGS[name]
    settings = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(settings | change))
    code, _, err = verify(capsys, folder)
    assert code == 2
    assert words in err


def test_verify_of_ranks_with_different_adapters_names_them(saved: Path, capsys: pytest.CaptureFixture[str]):
    code, _, err = verify(capsys, saved / "each its own")
    assert code == 2
    assert "each rank trained its own" in err


def test_verify_of_a_trained_base_names_its_parameters(saved: Path, capsys: pytest.CaptureFixture[str]):
    code, _, err = verify(capsys, saved / "with its base")
    assert code == 2
    assert "1 parameter(s) of the base were trained with the adapters, such as base_model.model.lm_head.weight" in err


def test_verify_of_a_merge_without_experts_names_the_tensors(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    drop_from_merged(saved / "base", saved / "merged", tmp_path / "merged")
    code, _, err = verify(capsys, saved / "adapter", "--merged", tmp_path / "merged")
    assert code == 2
    assert "is not the base with these adapters" in err
    assert "as in the base are 4 tensor(s), such as model.layers.0.mlp.experts" in err
