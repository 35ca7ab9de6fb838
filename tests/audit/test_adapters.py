"""Audits of adapters, with faults that users of other stacks reported."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from benchmarks.support.families import EXPERTS, model_of
from benchmarks.support.processes import run_distributed
from tests.audit import adapters
from tests.audit.adapters import WEIGHTS, Edit, Tensors, changed, delete, rename, replace, save_adapter
from tests.integrations.peft.models import add_adapters
from tests.integrations.transformers.training import prepare, train_step
from toolkit.audit import checks
from toolkit.audit.tensors import open_checkpoint
from toolkit.integrations.transformers import causal_lm, save_pretrained

FAMILY = "olmoe"


def train(folder: Path) -> None:
    """Save adapters of two processes after two steps, with a trained base, and with other values on each rank."""
    model, rank = add_adapters(causal_lm(folder / "base"), r=4, lora_alpha=64), dist.get_rank()
    experts, wrapped, optimizer = prepare(model, lr=0.1)
    for step in range(2):
        train_step(experts.accelerator, wrapped, optimizer, step, samples=32)
    save_pretrained(wrapped, folder / "adapter")
    head = model.base_model.model.lm_head.requires_grad_(True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        save_pretrained(wrapped, folder / "trained base")
    about_base = [each for each in caught if "of the base are trained" in str(each.message)]
    assert len(about_base) == (rank == 0)
    head.requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "q_proj.lora" in name:
            parameter.data += 0.1 * rank
    save_pretrained(wrapped, folder / "different ranks")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    model_of(FAMILY).save_pretrained(folder / "base")
    run_distributed(train, 2, folder)
    return folder


@pytest.mark.parametrize("layout", ["peft", "vllm", "sglang"])
def test_audit_of_saved_adapters_finds_nothing(layout: str, saved: Path, tmp_path: Path, toolkit: Any):
    words = ["adapter", "convert", saved / "adapter", tmp_path / layout, "--to", layout, "--json"]
    written = {"target": str(tmp_path / layout), "layout": layout, "updates": 2 * 2 * EXPERTS}
    assert toolkit(*words, "--base", saved / "base") == (0, json.dumps(written) + "\n")
    code, text = toolkit("audit", tmp_path / layout, "--against", saved / "base")
    assert (code, "finding" in text) == (0, False)
    assert "2 layers fit the base" in text


def zero(*parts: str) -> Edit:
    return replace(*parts, by=torch.zeros_like)


def by_expert(matrix: str, by: Any) -> Edit:
    """Return an edit of lora_A or lora_B by a function of their values with experts first."""
    if matrix == "lora_A":
        return replace("experts", matrix, by=lambda a: by(a.view(EXPERTS, -1, a.shape[1])).view_as(a))
    return replace(
        "experts", matrix, by=lambda b: by(b.view(len(b), -1, EXPERTS).movedim(2, 0)).movedim(0, 2).flatten(1)
    )


def keep(*experts: int) -> Any:
    mask = torch.zeros(EXPERTS, 1, 1)
    mask[list(experts)] = 1
    return lambda rows: rows * mask


def swap(rows: torch.Tensor) -> torch.Tensor:
    return rows[[1, 0, *range(2, EXPERTS)]]


EDITS: dict[str, list[Edit]] = {
    "gate_up_proj.lora_A is zero in expert(s) 1-7": [by_expert("lora_A", keep(0)), by_expert("lora_B", keep(0))],
    "norms are not those of what the ranks had": [adapters.order_by_expert],
    "experts are in another order than the ranks had": [by_expert("lora_A", swap), by_expert("lora_B", swap)],
    "layers.0.mlp.experts has 1 adapters for 2 target_parameters": [delete("experts.lora_")],
    "does not begin with base_model.model.": [rename("base_model.model.", "module.base_model.model.")],
}
SETTINGS: dict[str, dict[str, Any]] = {
    "was 16 in training, and is 1 by adapter_config.json": {"lora_alpha": 4},
    "was 16 in training, and is 32": {"use_rslora": True},
    "which rank 3 does not divide": {"r": 3},
}


@pytest.mark.parametrize("message", [*EDITS, *SETTINGS])
def test_audit_of_faulty_adapters_reports_fault(message: str, saved: Path, tmp_path: Path, toolkit: Any):
    edits, settings = EDITS.get(message, []), SETTINGS.get(message, {})
    code, text = toolkit("audit", changed(saved / "adapter", tmp_path / "faulty", *edits, **settings))
    assert code == 1
    assert message in text


AT = "base_model.model.model.layers.1.mlp.experts"


def add_expert(tensors: Tensors) -> None:
    tensors |= {name.replace(".7.", ".8."): value + 1 for name, value in tensors.items() if ".experts.7." in name}


DOWN = f"{AT}.2.down_proj.lora_A"
WIDE = torch.randn(8, 4, 25)


@pytest.mark.parametrize(
    ("layout", "edit", "tensor", "message"),
    [
        ("peft", zero("layers.1", "experts.lora_B"), "lora_B", "down_proj.lora_B is zero in every expert"),
        ("peft", zero("layers.1", "experts.lora_A"), "lora_A", "down_proj.lora_A is zero in every expert"),
        ("vllm", zero(".5.gate_proj.lora_A"), "5.gate_proj.lora_A", "gate_proj.lora_A is zero in expert(s) 5"),
        ("vllm", zero("lora_B"), "0.down_proj.lora_B", "lora_B is zero in every expert: they were frozen"),
        ("vllm", delete(".experts.7."), "0.up_proj.lora_B", "of 1 of 8 experts is missing: expert(s) 7"),
        ("vllm", add_expert, "8.up_proj.lora_B", "of experts beyond 8: expert(s) 8"),
        ("vllm", delete(".down_proj."), "", "no layer has adapters of down_proj, which adapter_config.json names"),
        ("vllm", delete("layers.1."), "", "layer(s) 1: have no adapters of experts"),
        ("peft", delete("layers.1."), "", "layer(s) 1: have no adapters of experts"),
        ("sglang", delete("layers.0."), "", "layer(s) 0: have no adapters of experts"),
        ("vllm", delete(".3.up_proj.lora_B"), "3.up_proj.lora_A", "has lora_A or lora_B alone in expert(s) 3"),
        ("vllm", rename(".down_proj.", ".out_proj."), "0.out_proj.lora_A", "out_proj is not a matrix of the base's"),
        ("vllm", rename("layers.1.", "layers.2."), "0.down_proj.lora_A", "2.mlp.experts: down_proj is not a matrix"),
        ("sglang", rename("_proj.lora_", "_proj.of_"), "of_A", "is not of a known layout, so it is not loaded"),
        ("vllm", replace(DOWN, by=lambda a: a[:2]), "2.down_proj.lora_A", "down_proj.lora_A has another rank than 4"),
        ("vllm", replace(DOWN, by=torch.flatten), "2.down_proj.lora_A", "down_proj.lora_A has another rank than 4"),
        (
            "sglang",
            replace(f"{AT}.down_proj.lora_A", by=lambda _: WIDE),
            "down_proj.lora_A",
            "16 outputs and 25 inputs",
        ),
    ],
)
def test_audit_of_planted_fault_in_layout_reports_experts_and_tensors(
    layout: str, edit: Edit, tensor: str, message: str, layouts: Path, tmp_path: Path
):
    found = checks.audit(changed(layouts / layout, tmp_path / "faulty", edit), layouts / "base").findings
    reported = [each for each in found if message in each.message]
    assert reported, [each.message for each in found]
    written = {*load_file(tmp_path / "faulty" / WEIGHTS)}
    assert not tensor or any(name.endswith(f"{tensor}.weight") for each in reported for name in each.tensors)
    assert all(name in written for each in found for name in each.tensors)


def separate_experts(tensors: Tensors) -> None:
    for name in [name for name in tensors if ".experts." in name]:
        value, (head, tail) = tensors.pop(name), name.split(".experts.")
        for expert, row in enumerate(value):
            tensors[f"{head}.experts.{tail.replace('_proj.', f'_projs.{expert}.')}"] = row.clone()


ALL = "3 of 3 matrices of experts: down_proj, gate_proj, up_proj ({} of expert weights)"
DOWN_ONLY = "1 of 3 matrices of experts: down_proj (33% of expert weights), none of gate_proj, up_proj"


@pytest.mark.parametrize("edits", [[], [adapters.share], [separate_experts]])
def test_audit_of_shared_and_separate_matrices_finds_nothing(edits: list[Edit], layouts: Path, tmp_path: Path):
    found = checks.audit(changed(layouts / "sglang", tmp_path / "other", *edits), layouts / "base")
    assert not found.findings
    assert {"2 layers with 8 experts, none missing", f"adapters of {ALL.format('100%')}"} <= set(found.facts)


@pytest.mark.parametrize(
    ("settings", "adapted"),
    [
        ({"rank_pattern": {r".*\.gate_up_proj": 8}, "alpha_pattern": {"q_proj": 4}}, ALL.format("100%")),
        (
            {"target_parameters": ["layers.0.mlp.experts.gate_up_proj", "layers.1.mlp.experts.down_proj"]},
            ALL.format("50%"),
        ),
        ({"target_parameters": ["down_proj", "gate_up_proj"]}, ALL.format("100%")),
        ({"target_modules": ".*[qv]_proj"}, ALL.format("100%")),
        ({"target_modules": [], "target_parameters": ["mlp.experts.down_proj"]}, DOWN_ONLY),
    ],
)
def test_audit_of_adapters_with_peft_settings_finds_nothing(settings: dict[str, Any], adapted: str, tmp_path: Path):
    save_adapter(tmp_path, "qwen3_moe", **settings)
    found = checks.audit(tmp_path / "peft", tmp_path / "base")
    assert not found.findings
    assert {"2 layers fit the base", f"adapters of {adapted}"} <= set(found.facts)
    sizes = {name: each.shape for name, each in open_checkpoint(tmp_path / "peft").tensors.items() if "experts" in name}
    assert {shape[0] for shape in sizes.values()} == {8}
    assert all(shape[2] in (16, 24) for name, shape in sizes.items() if "lora_A" in name)


def test_audit_of_attention_adapters_finds_nothing(tmp_path: Path):
    save_adapter(tmp_path, "qwen3_moe", target_parameters=None)
    found = checks.audit(tmp_path / "peft", tmp_path / "base")
    assert not found.findings
    assert not [fact for fact in found.facts if "each expert has" in fact or "fit the base" in fact]
    assert "adapters of 0 of 3 matrices of experts, none of down_proj, gate_proj, up_proj" in found.facts
    lost = changed(tmp_path / "peft", tmp_path / "lost", target_parameters=["mlp.experts.down_proj"])
    assert [each.message for each in checks.audit(lost).findings] == ["no tensor is an expert's"]
    vain = changed(tmp_path / "peft", tmp_path / "vain", target_modules=["q_proj", "up_proj"])
    said = "no module has adapters of up_proj, which adapter_config.json names"
    assert [each.message for each in checks.audit(vain).findings] == [said]


@pytest.mark.parametrize(
    ("folder", "message"),
    [
        ("different ranks", "ranks had different values of"),
        ("trained base", "1 parameters of the base were trained, such as base_model.model.lm_head.weight"),
    ],
)
def test_audit_of_adapters_reads_record_of_ranks(folder: str, message: str, saved: Path, toolkit: Any):
    code, text = toolkit("audit", saved / folder)
    assert code == 1
    assert message in text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("adapter_config.json", "[1"),
        ("adapter_config.json", "[]"),
        ("adapter_config.json", '{"r": 0}'),
        ("adapter_config.json", '{"r": 1000000000}'),
        ("adapter_config.json", '{"r": 4, "peft_type": "IA3"}'),
        ("adapter_config.json", '{"r": "8", "auto_map": {"AutoModel": "evil.Model"}}'),
        ("adapter_record.json", "[]"),
        ("adapter_record.json", '{"norms": {}, "scaling": {}, "differ": 5, "trained_of_base": []}'),
        ("adapter_model.safetensors", "\x7f\x7f\x7f\x7f\x7f\x7f\x7f\x7f{}"),
        ("adapter_model.safetensors", "cut"),
    ],
)
def test_audit_of_damaged_adapters_exits_with_one_line(name: str, text: str, saved: Path, tmp_path: Path, toolkit: Any):
    folder = changed(saved / "adapter", tmp_path / "faulty")
    (folder / name).write_text(text)
    code, printed = toolkit("audit", folder)
    assert code == 2
    assert printed.startswith("error: ")
    assert len(printed.splitlines()) == 1
