"""`toolkit audit` of adapters: faults that users of other stacks reported are named, and good files have none."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.audit.adapters import WEIGHTS as WEIGHTS_FILE
from tests.audit.adapters import Tensors, changed, save_adapter
from tests.integrations.peft.faults import MATRICES, SETTINGS, WEIGHTS
from tests.integrations.peft.models import config
from tests.integrations.transformers.families import awaken, tokens
from tests.support.helpers import run_distributed
from toolkit.audit import checks
from toolkit.audit.convert import convert
from toolkit.audit.tensors import open_checkpoint
from toolkit.commands import main
from toolkit.integrations.transformers import causal_lm, save_pretrained

FAMILY = "olmoe"
Edit = Callable[[Tensors], object]


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


@pytest.mark.parametrize("layout", ["peft", "vllm", "sglang"])
def test_audit_of_saved_adapters_finds_nothing(
    layout: str, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    convert(saved / "adapter", tmp_path / layout, layout, saved / "base")
    code, said = audit(capsys, tmp_path / layout, "--against", saved / "base")
    assert (code, "finding" in said) == (0, False)
    assert "2 layers fit the base" in said


@pytest.mark.parametrize("name", [*WEIGHTS, *SETTINGS])
def test_audit_of_faulty_adapters_names_the_fault(
    name: str, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    edit, settings, words = (WEIGHTS[name][0], {}, WEIGHTS[name][1]) if name in WEIGHTS else (None, *SETTINGS[name])
    code, said = audit(capsys, changed(saved / "adapter", tmp_path / "faulty", edit, **settings))
    assert code == 1
    assert words in said


AT = "base_model.model.model.layers.1.mlp.experts"


def zero(*parts: str) -> Edit:
    return lambda tensors: [value.zero_() for name, value in tensors.items() if all(part in name for part in parts)]


def drop(*parts: str) -> Edit:
    return lambda tensors: [tensors.pop(name) for name in list(tensors) if all(part in name for part in parts)]


def add_expert(tensors: Tensors) -> None:
    for name in [name for name in tensors if ".experts.7." in name]:
        tensors[name.replace(".experts.7.", ".experts.8.")] = tensors[name] + 1


def rename(tensors: Tensors) -> None:
    for name in [name for name in tensors if ".down_proj." in name]:
        tensors[name.replace(".down_proj.", ".out_proj.")] = tensors.pop(name)


def move_layer(tensors: Tensors) -> None:
    for name in [name for name in tensors if ".layers.1." in name]:
        tensors[name.replace(".layers.1.", ".layers.2.")] = tensors.pop(name)


def widen(tensors: Tensors) -> None:
    tensors[f"{AT}.down_proj.lora_A.weight"] = torch.ones(8, 4, 25).normal_()


def other_rank(tensors: Tensors) -> None:
    tensors[f"{AT}.2.down_proj.lora_A.weight"] = tensors[f"{AT}.2.down_proj.lora_A.weight"][:2].clone()


def flatten(tensors: Tensors) -> None:
    tensors[f"{AT}.2.down_proj.lora_A.weight"] = tensors[f"{AT}.2.down_proj.lora_A.weight"].flatten()


def repeat(tensors: Tensors) -> None:
    tensors[f"{AT}.down_proj.lora_A.weight"][6] = tensors[f"{AT}.down_proj.lora_A.weight"][1]


def broken(tensors: Tensors) -> None:
    tensors[f"{AT}.down_proj.lora_B.weight"][3, 0, 0] = float("inf")


@pytest.mark.parametrize(
    ("layout", "edit", "words", "tensor"),
    [
        ("peft", zero("layers.1", "experts.lora_B"), "down_proj.lora_B is zero in every expert", "lora_B.weight"),
        ("peft", zero("layers.1", "experts.lora_A"), "down_proj.lora_A is zero in every expert", "lora_A.weight"),
        ("vllm", zero(".5.gate_proj.lora_A"), "gate_proj.lora_A is zero in expert(s) 5", "5.gate_proj.lora_A.weight"),
        ("vllm", zero("lora_B"), "lora_B is zero in every expert: they were frozen", "0.down_proj.lora_B.weight"),
        ("vllm", drop(".experts.7."), "of 1 of 8 experts is missing: expert(s) 7", "0.up_proj.lora_B.weight"),
        ("vllm", add_expert, "of experts beyond 8: expert(s) 8", "8.up_proj.lora_B.weight"),
        (
            "vllm",
            drop(".3.up_proj.lora_B"),
            "up_proj has lora_A or lora_B alone in expert(s) 3",
            "3.up_proj.lora_A.weight",
        ),
        ("vllm", rename, "out_proj is not a matrix of the base's experts", "0.out_proj.lora_A.weight"),
        ("vllm", move_layer, "2.mlp.experts: down_proj is not a matrix of", "0.down_proj.lora_A.weight"),
        ("vllm", other_rank, "down_proj.lora_A has another rank than 4", "2.down_proj.lora_A.weight"),
        ("vllm", flatten, "down_proj.lora_A has another rank than 4", "2.down_proj.lora_A.weight"),
        ("sglang", widen, "down_proj has 16 outputs and 25 inputs, which does not fit", "down_proj.lora_A.weight"),
        ("sglang", repeat, "expert(s) 6 repeats a matrix of expert(s) 1", "down_proj.lora_A.weight"),
        ("sglang", broken, "down_proj.lora_B has infinity in expert(s) 3", "down_proj.lora_B.weight"),
    ],
)
def test_audit_of_a_planted_fault_names_experts_and_tensors(
    layout: str, edit: Edit, words: str, tensor: str, layouts: Path, tmp_path: Path
):
    assert not checks.audit(layouts / layout, layouts / "base").findings
    found = checks.audit(changed(layouts / layout, tmp_path / "faulty", edit), layouts / "base").findings
    said = [each for each in found if words in each.message]
    assert said, [each.message for each in found]
    written = {*load_file(tmp_path / "faulty" / WEIGHTS_FILE)}
    assert any(name.endswith(tensor) for each in said for name in each.tensors)
    assert all(name in written for each in found for name in each.tensors)


def share(tensors: Tensors) -> None:
    for name in [name for name in tensors if "gate_up_proj.lora_A" in name or "down_proj.lora_B" in name]:
        tensors[name] = tensors[name][:1].clone()


def list_experts(tensors: Tensors) -> None:
    for name in [name for name in tensors if ".experts." in name]:
        value, (head, tail) = tensors.pop(name), name.split(".experts.")
        for expert, row in enumerate(value):
            tensors[f"{head}.experts.{tail.replace('_proj.', f'_projs.{expert}.')}"] = row.clone()


@pytest.mark.parametrize("edit", [share, list_experts])
def test_audit_of_shared_and_listed_matrices_finds_nothing(edit: Edit, layouts: Path, tmp_path: Path):
    found = checks.audit(changed(layouts / "sglang", tmp_path / "other", edit), layouts / "base")
    assert not found.findings
    assert "2 layers with 8 experts, none missing" in found.facts


@pytest.mark.parametrize(
    "settings",
    [
        {"rank_pattern": {r".*\.gate_up_proj": 8}, "alpha_pattern": {"q_proj": 4}},
        {"target_parameters": ["layers.0.mlp.experts.gate_up_proj", "layers.1.mlp.experts.down_proj"]},
        {"target_parameters": ["down_proj", "gate_up_proj"]},
        {"target_modules": ".*[qv]_proj"},
        {"target_modules": [], "target_parameters": ["mlp.experts.down_proj"]},
    ],
)
def test_audit_of_any_settings_of_peft_finds_nothing(settings: dict[str, Any], tmp_path: Path):
    save_adapter(tmp_path, "qwen3_moe", **settings)
    found = checks.audit(tmp_path / "peft", tmp_path / "base")
    assert not found.findings
    assert "2 layers fit the base" in found.facts
    sizes = {name: each.shape for name, each in open_checkpoint(tmp_path / "peft").tensors.items() if "experts" in name}
    assert {shape[0] for shape in sizes.values()} == {8}
    assert all(shape[2] in (16, 24) for name, shape in sizes.items() if "lora_A" in name)


def test_audit_of_adapters_of_attention_says_that_experts_have_none(tmp_path: Path):
    save_adapter(tmp_path, "qwen3_moe", target_parameters=None)
    found = checks.audit(tmp_path / "peft", tmp_path / "base")
    assert [each.message for each in found.findings] == ["no tensor is an expert's"]
    assert not [fact for fact in found.facts if "each expert has" in fact or "fit the base" in fact]


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
        ("adapter_config.json", '{"r": 1000000000}'),
        ("adapter_config.json", '{"r": 4, "peft_type": "IA3"}'),
        ("adapter_config.json", '{"r": 4, "target_parameters": 5}'),
        ("adapter_config.json", '{"r": 4, "lora_alpha": [1]}'),
        ("adapter_config.json", '{"r": "8", "auto_map": {"AutoModel": "evil.Model"}}'),
        ("adapter_record.json", "[]"),
        ("adapter_record.json", '{"norms": {}, "scaling": {"a": []}, "differ": [], "trained_of_base": []}'),
        ("adapter_record.json", '{"norms": {}, "scaling": {}, "differ": 5, "trained_of_base": []}'),
        ("adapter_model.safetensors", "\x7f\x7f\x7f\x7f\x7f\x7f\x7f\x7f{}"),
        ("adapter_model.safetensors", "cut"),
    ],
)
def test_audit_of_damaged_adapters_is_one_line(
    name: str, text: str, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = changed(saved / "adapter", tmp_path / "faulty")
    (folder / name).write_text(text)
    code, said = audit(capsys, folder)
    assert code == 2
    assert said.startswith("error: ")
    assert len(said.splitlines()) == 1
