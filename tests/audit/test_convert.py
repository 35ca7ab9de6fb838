"""Conversion of expert adapters between the layouts of PEFT, vLLM and SGLang."""

import json
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.support.families import TWO_LAYERS, build
from tests.audit import adapters
from tests.audit.adapters import SETTINGS, WEIGHTS, Edit, Tensors, changed, delete, rename, replace, save_adapter
from tests.integrations.peft.models import MATRICES
from toolkit.audit import convert as conversion
from toolkit.audit.checks import audit
from toolkit.audit.convert import convert
from toolkit.errors import UserError
from toolkit.integrations.transformers import causal_lm

FAMILIES = "dots1 flex_olmo glm4_moe hunyuan_v1_moe minimax mixtral olmoe phimoe qwen2_moe qwen3_moe"


@pytest.fixture(scope="module", params=FAMILIES.split())
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    state = save_adapter(folder, request.param).merge_and_unload().state_dict()
    save_file({name: value.clone() for name, value in state.items()}, folder / "merged")
    return folder


def settings_of(folder: Path) -> dict[str, Any]:
    """Return the settings with sorted lists, because PEFT keeps them as sets."""
    settings: dict[str, Any] = json.loads((folder / SETTINGS).read_text())
    return {name: sorted(value) if isinstance(value, list) else value for name, value in settings.items()}


LINEAR = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2", "weight": "w2"}


def updates(folder: Path) -> dict[str, Tensor]:
    """Return the update (8, outputs, inputs) of each linear layer of experts, by the rule that all servers share."""
    tensors, settings = load_file(folder / WEIGHTS), json.loads((folder / SETTINGS).read_text())
    assert not settings.get("use_rslora")
    found: dict[str, list[Tensor]] = defaultdict(list)
    for name, a in sorted(tensors.items()):
        if "lora_A" in name:
            b, (module, _, tail) = tensors[name.replace("lora_A", "lora_B")], name.partition(".experts.")
            linear, at = tail.split(".lora_A")[0].split(".")[-1], module.replace("block_sparse_moe", "mlp")
            if linear in ("base_layer", "weight"):
                a, b = a.view(8, -1, a.shape[1]), b.view(len(b), -1, 8).permute(2, 0, 1)
            update = settings["lora_alpha"] / settings["r"] * (b @ a)
            names = ("w1", "w3") if linear in ("base_layer", "gate_up_proj") else (LINEAR.get(linear, linear),)
            for key, part in zip(names, update.chunk(len(names), -2), strict=True):
                found[f"{at}.{key}"].append(part)
    return {name: torch.stack(values).squeeze(0) for name, values in found.items()}


def state_of(folder: Path) -> Tensors:
    state: Tensors = causal_lm(folder, dtype=torch.float64).double().state_dict()
    return state


def merged_by_formula(base: Path, found: Tensors) -> Tensors:
    """Return the state of the model in `base` with the updates `found`."""
    state = state_of(base)
    for name, value in state.items():
        module, linears = name.rpartition(".experts.")[0], ("w2",) if "down_proj" in name else ("w1", "w3")
        update = found.get(f"base_model.model.{name.removesuffix('weight')}lora_A.weight.")
        if module:
            update = torch.cat([found[f"base_model.model.{module}.{linear}"] for linear in linears], 1)
        if update is not None:
            state[name] = value + update
    return state


def assert_close(found: Tensors, expected: Tensors) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_updates_are_those_that_peft_merges(saved: Path):
    assert_close(merged_by_formula(saved / "base", updates(saved / "peft")), load_file(saved / "merged"))


def to_tinker(tensors: Tensors) -> None:
    """Split the two halves of a shared outer adapter, which get different lora_A."""
    for name in [name for name in tensors if ".gate_up_proj." in name]:
        value = tensors.pop(name)
        parts = (value, 1 - value) if "lora_A" in name else value.chunk(2, 1)
        tensors |= {name.replace("gate_up_proj", of): part for of, part in zip(("w1", "w3"), parts, strict=True)}
    rename(".down_proj.", ".w2.")(tensors)


def differ(tensors: Tensors) -> None:
    """Give gate and up projections different lora_A, as with a module for each expert."""
    for linear in (".up_proj.", ".w3."):
        replace(linear, "lora_A", by=lambda a: 1 - a)(tensors)


SOURCES: dict[str, tuple[str, list[Edit]]] = {
    "PEFT": ("peft", []),
    "vLLM": ("vllm", []),
    "SGLang": ("sglang", []),
    "Megatron-Bridge": ("sglang", [adapters.share]),
    "Tinker": ("sglang", [adapters.share, to_tinker]),
    "modules": ("vllm", [differ]),
}


@pytest.mark.parametrize("source", SOURCES)
def test_convert_keeps_updates_of_each_layout_in_each_other(source: str, saved: Path, tmp_path: Path):
    layout, edits = SOURCES[source]
    given = saved / "peft"
    if layout != "peft":
        convert(saved / "peft", given := tmp_path / layout, layout, saved / "base")
    if edits:
        given = changed(given, tmp_path / "given", *edits)
    for to in ("peft", "vllm", "sglang"):
        count = convert(given, tmp_path / f"to {to}", to, saved / "base")
        assert_close(updates(tmp_path / f"to {to}"), updates(given))
        if not edits:
            assert convert(tmp_path / f"to {to}", tmp_path / f"from {to}", layout, saved / "base") == count
            assert (tmp_path / f"from {to}" / WEIGHTS).read_bytes() == (given / WEIGHTS).read_bytes()
            assert settings_of(tmp_path / f"from {to}") == settings_of(given)
    convert(given, tmp_path / "merged", "merged", saved / "base")
    expected = merged_by_formula(saved / "base", updates(given)) if edits else load_file(saved / "merged")
    assert_close(state_of(tmp_path / "merged"), expected)


@pytest.mark.parametrize("width", [24, 16, 8], ids=["none square", "square down_proj", "square gate_up_proj"])
@pytest.mark.parametrize(("family", "module"), [("gpt_oss", "mlp"), ("granitemoe", "block_sparse_moe")])
def test_convert_merges_with_stacked_experts_of_each_orientation(family: str, module: str, width: int, tmp_path: Path):
    model = build(family, **TWO_LAYERS | {"intermediate_size": width})
    targets = [name.replace("mlp", module) for name in MATRICES]
    expected = save_adapter(tmp_path, family, model, target_parameters=targets).merge_and_unload().state_dict()
    assert convert(tmp_path / "peft", tmp_path / "merged", "merged", tmp_path / "base") == 2 * 2 * 8 + 2
    assert_close(state_of(tmp_path / "merged"), expected)


def edited(base: Path, target: Path, *edits: Edit) -> Path:
    """Copy a base with edited tensors."""
    shutil.copytree(base, target)
    for path in target.glob("*.safetensors"):
        tensors = load_file(path)
        for edit in edits:
            edit(tensors)
        save_file(tensors, path)
    return target


def test_convert_to_merged_keeps_files_and_types_and_rounds_once(layouts: Path, tmp_path: Path, toolkit: Any):
    base = edited(layouts / "base", tmp_path / "base", replace("", by=Tensor.bfloat16))
    (base / "tokenizer.json").write_text("{}")
    source = changed(layouts / "peft", tmp_path / "peft", base_model_name_or_path=str(base))
    code, text = toolkit("adapter", "convert", source, tmp_path / "merged", "--to", "merged")
    assert (code, text) == (0, f"{tmp_path / 'merged'}: the base model with 34 updates added\n")
    paths = list(base.iterdir())
    assert sorted(path.name for path in paths) == sorted(path.name for path in (tmp_path / "merged").iterdir())
    for path in paths:
        merged = tmp_path / "merged" / path.name
        if path.suffix == ".json":
            assert merged.read_bytes() == path.read_bytes()
            continue
        before, after = load_file(path), load_file(merged)
        assert before.keys() == after.keys()
        for name, value in before.items():
            assert after[name].dtype == torch.bfloat16
            if name.endswith("q_proj.weight"):
                update = updates(source)[f"base_model.model.{name.removesuffix('weight')}lora_A.weight."]
                assert torch.equal((value.float() + update.float()).bfloat16(), after[name])


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (delete("1.self_attn.q_proj"), "base: has no weight model.layers.1.self_attn.q_proj, which has adapters"),
        (delete("layers.0", "experts.5.up_proj"), "base: has no weight model.layers.0.mlp.experts.5.up_proj"),
        (replace("experts.5.up_proj", by=lambda w: w[:2]), "experts.5.up_proj.weight has shape (2, 16)"),
        (replace("q_proj", by=lambda w: w.to(torch.float8_e4m3fn)), "has the quantized type F8_E4M3"),
        (replace("experts.0.", by=lambda w: w.to(torch.int8)), "has the quantized type I8"),
    ],
)
def test_convert_to_merged_with_unfit_base_exits_with_one_line(
    edit: Edit, message: str, layouts: Path, tmp_path: Path, toolkit: Any
):
    base, target = edited(layouts / "base", tmp_path / "base", edit), tmp_path / "out"
    (base / "model.safetensors.index.json").unlink()
    code, text = toolkit("adapter", "convert", layouts / "peft", target, "--to", "merged", "--base", base)
    assert (code, len(text.splitlines()), target.exists()) == (2, 1, False)
    assert message in text


def test_convert_to_merged_without_all_files_raises(layouts: Path, tmp_path: Path):
    source = changed(layouts / "peft", tmp_path / "moved", base_model_name_or_path="org/name")
    saved = changed(layouts / "peft", tmp_path / "saved", lambda tensors: tensors.update({HEAD: torch.ones(2)}))
    cut = edited(layouts / "base", tmp_path / "cut")
    min(cut.glob("*.safetensors")).unlink()
    (tmp_path / "bin").mkdir()
    shutil.copy(layouts / "base" / "config.json", tmp_path / "bin")
    torch.save({"weight": torch.ones(2)}, tmp_path / "bin" / "pytorch_model.bin")
    for folder, base, message in (
        (source, None, "base: adapter_config.json names no folder with a model"),
        (source, cut, "which is missing. Save the model again"),
        (source, tmp_path / "bin", "has the format torch.save instead of safetensors"),
        (saved, layouts / "base", "lm_head.weight is not of an adapter"),
    ):
        with pytest.raises(UserError, match=message):
            convert(folder, tmp_path / "out", "merged", base)
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("layout", ["peft", "sglang"])
def test_convert_of_unequal_ranks_of_nemo_writes_one_rank(layout: str, layouts: Path, tmp_path: Path):
    """The attention has rank 8, and each of two chosen experts rank 4 and thus twice the scaling."""
    wider = [
        replace("q_proj.lora_A", by=lambda a: torch.cat([a, 0 * a])),
        replace("q_proj.lora_B", by=lambda b: torch.cat([2 * b, b], 1)),
    ]
    given = changed(layouts / layout, tmp_path / "given", *wider, r=8)
    (given / "automodel_peft_config.json").write_text(json.dumps({"moe_rank_scaling": True}))
    convert(given, tmp_path / "vllm", "vllm", layouts / "base")
    torch.testing.assert_close(updates(tmp_path / "vllm"), updates(layouts / "peft"), rtol=1e-12, atol=1e-12)
    assert {value.shape[0] for name, value in load_file(tmp_path / "vllm" / WEIGHTS).items() if "lora_A" in name} == {8}


def test_convert_of_rank_pattern_writes_one_rank(tmp_path: Path):
    merged = save_adapter(tmp_path, "qwen3_moe", rank_pattern={"q_proj": 2}).merge_and_unload().state_dict()
    convert(tmp_path / "peft", tmp_path / "vllm", "vllm", tmp_path / "base")
    assert not settings_of(tmp_path / "vllm")["rank_pattern"]
    assert_close(merged_by_formula(tmp_path / "base", updates(tmp_path / "vllm")), merged)


@pytest.mark.parametrize("to", ["peft", "vllm", "sglang"])
def test_convert_folds_rslora_into_alpha(to: str, layouts: Path, tmp_path: Path):
    given = changed(layouts / "peft", tmp_path / "given", use_rslora=True)
    convert(given, tmp_path / to, to, layouts / "base")
    doubled = {name: 2 * value for name, value in updates(layouts / "peft").items()}
    torch.testing.assert_close(updates(tmp_path / to), doubled, rtol=1e-12, atol=1e-12)


def stack(tensors: Tensors) -> None:
    replace("experts", "lora_A", by=lambda a: a.view(8, 4, -1))(tensors)
    replace("experts", "lora_B", by=lambda b: b.view(len(b), 4, 8))(tensors)


@pytest.mark.parametrize(
    ("edits", "settings", "found"),
    [
        ([stack], {}, []),
        ([adapters.swap_sides], {"peft_version": "0.18.0"}, ["inputs and outputs swapped"]),
        ([adapters.swap_sides], {"peft_version": None}, ["inputs and outputs swapped"]),  # NeMo AutoModel
        ([adapters.order_by_expert], {}, ["another order of experts"]),
        ([adapters.order_by_expert], {"lora_B_layout": "grouped_by_expert"}, ["another order of experts"]),
        (
            [adapters.swap_sides, adapters.order_by_expert],
            {},
            ["inputs and outputs swapped", "another order of experts"],
        ),
    ],
)
def test_convert_reads_files_of_other_programs(
    edits: list[Edit], settings: dict[str, Any], found: list[str], layouts: Path, tmp_path: Path
):
    source = changed(layouts / "peft", tmp_path / "source", *edits, **settings)
    findings = [each.message for each in audit(source).findings]
    assert len(findings) == len(found)
    assert all(part in message for part, message in zip(found, findings, strict=True))
    convert(source, tmp_path / "peft", "peft")
    assert (tmp_path / "peft" / WEIGHTS).read_bytes() == (layouts / "peft" / WEIGHTS).read_bytes()
    assert not audit(tmp_path / "peft").findings


def test_convert_asks_for_the_order_of_experts_that_values_do_not_show(layouts: Path, tmp_path: Path):
    random = replace("experts", "lora_B", by=torch.randn_like)
    source = changed(layouts / "peft", tmp_path / "random", random)
    assert any("order of experts in lora_B is not checked" in fact for fact in audit(source).facts)
    with pytest.raises(UserError, match="Set lora_B_layout to 'rank_major'"):
        convert(source, tmp_path / "vllm", "vllm", layouts / "base")
    told = changed(source, tmp_path / "told", lora_B_layout="rank_major")
    assert convert(told, tmp_path / "vllm", "vllm", layouts / "base") == 2 * 2 * 8


BY_LAYER = ["model.layers.0.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"]


@pytest.mark.parametrize(
    ("family", "targets", "expected"),
    [
        ("qwen3_moe", {"target_parameters": BY_LAYER}, ["down_proj", "gate_proj", "q_proj", "up_proj"]),
        ("qwen2_moe", {"target_modules": ["q_proj", "gate_proj"]}, ["down_proj", "gate_proj", "q_proj", "up_proj"]),
    ],
)
def test_convert_keeps_targets(family: str, targets: Any, expected: list[str], tmp_path: Path):
    save_adapter(tmp_path, family, **targets)
    convert(tmp_path / "peft", tmp_path / "vllm", "vllm", tmp_path / "base")
    convert(tmp_path / "vllm", tmp_path / "back", "peft", tmp_path / "base")
    assert (tmp_path / "back" / WEIGHTS).read_bytes() == (tmp_path / "peft" / WEIGHTS).read_bytes()
    assert settings_of(tmp_path / "back") == settings_of(tmp_path / "peft")
    assert settings_of(tmp_path / "vllm")["target_modules"] == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        *(({name: True}, f"{name} is not known") for name in ("use_dora", "use_qalora", "fan_in_fan_out", "a_new_one")),
        *(({"init_lora_weights": name}, "init_lora_weights") for name in ("pissa", "olora", "loftq", "corda")),
        ({"bias": "all"}, "bias"),
        *(({name: [1]}, name) for name in ("modules_to_save", "alora_invocation_tokens", "arrow_config")),
        ({"rank_pattern": {"q_proj": 2}}, "has rank 4 instead of 2"),
        ({"rank_pattern": {r"layers\.[01].*": 2}}, "is not a suffix"),
        ({"target_modules": ".*q_proj"}, "target_modules is a pattern"),
        ({"target_parameters": [*MATRICES, "q_proj.weight"]}, "'q_proj.weight' is not a parameter of experts"),
        ({"target_parameters": [MATRICES[0]]}, "has 2 adapters for 1 target_parameters"),
        ({"r": 8}, "not all of 8 experts"),
        ({"lora_alpha": 10**400}, "lora_alpha"),
        ({"r": 3}, "rank 3 does not divide"),
    ],
)
def test_convert_with_unsupported_settings_raises(
    settings: dict[str, Any], message: str, layouts: Path, tmp_path: Path
):
    source = changed(layouts / "peft", tmp_path / "changed", **settings)
    with pytest.raises(UserError, match=message):
        convert(source, tmp_path / "out", "vllm", layouts / "base")
    assert not (tmp_path / "out").exists()


HEAD = "base_model.model.lm_head.weight"


def halve_rank(tensors: Tensors) -> None:
    for matrix, dim in (("lora_A", 0), ("lora_B", 1)):
        name = f"{DOWN_2}.{matrix}.weight"
        tensors[name] = tensors[name].narrow(dim, 0, 2).clone()


def to_float8(value: Tensor) -> Tensor:
    return value.to(torch.float8_e4m3fn)


def add_bias(tensors: Tensors) -> None:
    tensors[f"{DOWN_2}.lora_B.bias"] = torch.ones(16)


DOWN_2 = "base_model.model.model.layers.1.mlp.experts.2.down_proj"
A, B = "gate_up_proj.lora_A", "gate_up_proj.lora_B"


@pytest.mark.parametrize(
    ("layout", "edit", "message"),
    [
        ("vllm", rename(".down_proj.", ".out_proj."), "adapters of out_proj, which the base does not have"),
        ("vllm", delete(".experts.7."), "not all of 8 experts"),
        ("vllm", delete("layers.1", ".3.up_proj.lora_B"), "up_proj: not all of 8 experts"),
        ("vllm", delete(".up_proj."), "not all of its linear layers"),
        ("vllm", delete(".experts."), "has no adapters of experts"),
        ("vllm", halve_rank, "not all experts have one type and the rank 4"),
        ("vllm", replace(f"{DOWN_2}.lora_B", by=to_float8), "down_proj: not all experts have one type"),
        ("vllm", replace(".up_proj.", by=to_float8), "different types"),
        ("vllm", add_bias, "not all of 8 experts"),
        ("sglang", delete("layers.1", "down_proj.lora_B"), "down_proj: not all of 8 experts"),
        ("sglang", replace(B, by=lambda b: b[:, 1:]), "do not fit gate_up_proj"),
        ("sglang", replace(A, by=lambda a: a[:2]), "gate_up_proj: not all of 8 experts"),
    ],
)
def test_convert_of_unsupported_tensors_exits_with_one_line(
    layout: str, edit: Edit, message: str, layouts: Path, tmp_path: Path, toolkit: Any
):
    source, target = changed(layouts / layout, tmp_path / "changed", edit), tmp_path / "out"
    to = "vllm" if layout == "sglang" else "peft"
    code, text = toolkit("adapter", "convert", source, target, "--to", to, "--base", layouts / "base")
    assert code == 2
    (line,) = text.splitlines()
    assert message in line
    assert not target.exists()


def test_convert_with_another_base_raises(layouts: Path, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nemotron_h", "num_experts": 8}))
    with pytest.raises(UserError, match="do not fit gate_up_proj"):
        convert(layouts / "peft", tmp_path / "out", "vllm", tmp_path)


@pytest.mark.parametrize("family", ["gpt_oss", "intern_s2_preview"])
def test_convert_for_stacked_family_of_vllm_keeps_layout_of_peft(family: str, layouts: Path, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, "num_experts": 8}))
    convert(layouts / "peft", tmp_path / "vllm", "vllm", tmp_path)
    assert (tmp_path / "vllm" / WEIGHTS).read_bytes() == (layouts / "peft" / WEIGHTS).read_bytes()


def test_convert_to_existing_folder_raises(layouts: Path):
    with pytest.raises(UserError, match="exists"):
        convert(layouts / "peft", layouts / "sglang", "sglang")


def test_convert_with_changed_updates_raises(layouts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def rolled(rows: Tensor, form: str) -> Tensor:
        return rows.roll(1, 0).flatten(0, 1) if form == "joined" else rows.permute(1, 2, 0).flatten(1)

    monkeypatch.setattr(conversion, "as_in_files", rolled)
    with pytest.raises(AssertionError, match="the adapters changed"):
        convert(layouts / "sglang", tmp_path / "out", "peft")
    assert not (tmp_path / "out").exists()


def test_convert_keeps_nan(layouts: Path, tmp_path: Path):
    edit = replace("layers.0.mlp.experts.lora_A", by=lambda a: a.index_fill(0, torch.tensor(0), torch.nan))
    convert(changed(layouts / "peft", tmp_path / "changed", edit), tmp_path / "sglang", "sglang")
    (name,) = (name for name, value in load_file(tmp_path / "sglang" / WEIGHTS).items() if value.isnan().any())
    assert name.endswith("layers.0.mlp.experts.down_proj.lora_A.weight")
