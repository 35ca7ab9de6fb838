"""`toolkit audit` of adapters: faults that users of other stacks reported are named, and good files have none."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.integrations.peft.faults import MATRICES, SETTINGS, WEIGHTS
from tests.integrations.peft.models import config
from tests.integrations.transformers.families import awaken, tokens
from tests.support.helpers import run_distributed
from toolkit.audit.convert import convert
from toolkit.commands import main
from toolkit.integrations.transformers import causal_lm, save_pretrained

FAMILY = "olmoe"


def trained(folder: Path, shared: bool) -> None:
    """A few steps on two processes; not `shared`: each then has its own adapters of attention."""
    from accelerate import Accelerator
    from peft import LoraConfig, get_peft_model

    from toolkit.integrations.accelerate.expert_parallel import ExpertParallel

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


def audit(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    code = main(["audit", *map(str, words)])
    said = capsys.readouterr()
    return code, said.out + said.err


def faulty(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved / "adapter", tmp_path / "faulty")
    return tmp_path / "faulty"


@pytest.mark.parametrize("layout", ["peft", "vllm", "sglang"])
def test_audit_of_saved_adapters_finds_nothing(
    layout: str, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    convert(saved / "adapter", tmp_path / layout, layout, saved / "base")
    code, said = audit(capsys, tmp_path / layout, "--against", saved / "base")
    assert (code, "finding" in said) == (0, False)
    assert "2 layers fit the base" in said


@pytest.mark.parametrize("name", WEIGHTS)
def test_audit_of_faulty_adapters_names_the_fault(
    name: str, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder, (fault, words) = faulty(saved, tmp_path), WEIGHTS[name]
    tensors = load_file(folder / "adapter_model.safetensors")
    fault(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")
    code, said = audit(capsys, folder)
    assert code == 1
    assert words in said


@pytest.mark.parametrize("name", SETTINGS)
def test_audit_of_faulty_adapter_settings_names_the_fault(
    name: str, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder, (change, words) = faulty(saved, tmp_path), SETTINGS[name]
    settings = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(settings | change))
    code, said = audit(capsys, folder)
    assert code == 1
    assert words in said


def test_audit_of_separate_adapters_without_a_pair_names_the_expert(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    convert(saved / "adapter", tmp_path / "vllm", "vllm", saved / "base")
    tensors = load_file(tmp_path / "vllm" / "adapter_model.safetensors")
    del tensors["base_model.model.model.layers.1.mlp.experts.3.up_proj.lora_B.weight"]
    save_file(tensors, tmp_path / "vllm" / "adapter_model.safetensors")
    code, said = audit(capsys, tmp_path / "vllm")
    assert code == 1
    assert "layers.1.mlp.experts: up_proj has lora_A or lora_B alone in expert(s) 3" in said


def test_audit_of_adapters_of_another_base_names_the_sizes(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    other = config(FAMILY)
    other.hidden_size *= 2
    causal_lm(other).save_pretrained(tmp_path / "base")
    code, said = audit(capsys, saved / "adapter", "--against", tmp_path / "base")
    assert code == 1
    assert "which does not fit the base" in said


@pytest.mark.parametrize(
    ("folder", "words"),
    [
        ("each its own", "ranks had different values of"),
        ("with its base", "1 parameters of the base were trained, such as base_model.model.lm_head.weight"),
    ],
)
def test_audit_of_adapters_reads_the_record_of_the_ranks(
    folder: str, words: str, saved: Path, capsys: pytest.CaptureFixture[str]
):
    code, said = audit(capsys, saved / folder)
    assert code == 1
    assert words in said


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("adapter_config.json", "[1"),
        ("adapter_config.json", "[]"),
        ("adapter_config.json", '{"r": 0}'),
        ("adapter_config.json", '{"r": "8", "auto_map": {"AutoModel": "evil.Model"}}'),
        ("adapter_record.json", "[]"),
        ("adapter_model.safetensors", "cut"),
    ],
)
def test_audit_of_damaged_adapters_is_one_line(
    name: str, text: str, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = faulty(saved, tmp_path)
    (folder / name).write_text(text)
    code, said = audit(capsys, folder)
    assert code == 2
    assert said.startswith("error: ")
    assert len(said.splitlines()) == 1
