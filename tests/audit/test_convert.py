"""`toolkit adapter convert`: expert adapters in the layouts of PEFT, vLLM and SGLang have the same updates."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.audit.adapters import SETTINGS, TARGETS, WEIGHTS, Tensors, changed, save_adapter
from toolkit.audit import convert as conversion
from toolkit.audit.checks import audit
from toolkit.audit.convert import convert
from toolkit.commands import main
from toolkit.errors import UserError
from toolkit.integrations.transformers import causal_lm

FAMILIES = ("qwen3_moe", "mixtral")
LINEARS = {
    "qwen3_moe": ("mlp", {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}),
    "mixtral": ("block_sparse_moe", {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}),
}


@pytest.fixture(scope="module", params=FAMILIES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    state = save_adapter(folder, request.param).merge_and_unload().state_dict()
    save_file({name: value.clone() for name, value in state.items() if ".experts." in name}, folder / "merged")
    return folder


def settings_of(folder: Path) -> dict[str, Any]:
    """The settings with lists that PEFT keeps as sets in one order."""
    settings: dict[str, Any] = json.loads((folder / SETTINGS).read_text())
    return {name: sorted(value) if isinstance(value, list) else value for name, value in settings.items()}


@pytest.mark.parametrize(
    ("first", "second"), [("peft", "vllm"), ("peft", "sglang"), ("vllm", "peft"), ("sglang", "vllm")]
)
def test_convert_there_and_back_gives_the_same_bytes(first: str, second: str, saved: Path, tmp_path: Path):
    source = saved / "peft"
    if first != "peft":
        convert(source, source := tmp_path / first, first, saved / "base")
    assert convert(source, tmp_path / "there", second, saved / "base") == 2 * 2 * 8
    convert(tmp_path / "there", tmp_path / "back", first, saved / "base")
    assert (tmp_path / "back" / WEIGHTS).read_bytes() == (source / WEIGHTS).read_bytes()
    assert (tmp_path / "there" / WEIGHTS).read_bytes() != (source / WEIGHTS).read_bytes()
    assert settings_of(tmp_path / "back") == settings_of(source)


def test_converted_adapters_merge_to_the_weights_that_peft_merges(saved: Path, tmp_path: Path):
    convert(saved / "peft", tmp_path / "vllm", "vllm", saved / "base")
    base, merged = causal_lm(saved / "base").double(), load_file(saved / "merged")
    adapters = load_file(tmp_path / "vllm" / WEIGHTS)
    module, linears = LINEARS[base.config.model_type]
    compared = 0
    for name, weight in base.state_dict().items():
        if ".experts." not in name:
            continue
        at = f"base_model.model.{name.rpartition('.')[0]}".replace(".mlp.", f".{module}.")
        for expert, own in enumerate(weight):
            of = [f"{at}.{expert}.{linear}" for linear in linears[name.rpartition(".")[2]]]
            update = torch.cat([adapters[f"{n}.lora_B.weight"] @ adapters[f"{n}.lora_A.weight"] for n in of])
            torch.testing.assert_close(own + 2.0 * update, merged[name][expert], rtol=1e-12, atol=1e-12)
            compared += 1
    assert compared == 2 * 2 * 8


def by_hand(folder: Path, settings: dict[str, Any]) -> Path:
    """Write adapters of three experts in vLLM's layout, with the number of the expert in each."""
    at, tensors = "base_model.model.model.layers.0.mlp.experts", {}
    for expert in range(3):
        for linear, inputs, outputs in (("gate_proj", 4, 6), ("up_proj", 4, 6), ("down_proj", 6, 4)):
            side = 10.0 if linear == "up_proj" else 0.0
            tensors[f"{at}.{expert}.{linear}.lora_A.weight"] = torch.full((2, inputs), 1.0 + expert)
            tensors[f"{at}.{expert}.{linear}.lora_B.weight"] = torch.full((outputs, 2), side + 1 + expert)
    (folder / "base").mkdir()
    (folder / "base" / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "num_experts": 3}))
    (folder / "vllm").mkdir()
    save_file(tensors, folder / "vllm" / WEIGHTS)
    usual = {"r": 2, "lora_alpha": 4, "target_modules": ["gate_proj", "up_proj", "down_proj"]}
    (folder / "vllm" / SETTINGS).write_text(json.dumps(usual | settings))
    return folder / "vllm"


@pytest.mark.parametrize("settings", [{}, {"peft_version": "0.15.2"}])
def test_convert_reads_a_file_written_by_hand_in_the_layout_of_vllm(settings: dict[str, Any], tmp_path: Path):
    source, at = by_hand(tmp_path, settings), "base_model.model.model.layers.0.mlp.experts"
    convert(source, tmp_path / "peft", "peft", tmp_path / "base")
    convert(source, tmp_path / "sglang", "sglang", tmp_path / "base")
    fused, stacked = load_file(tmp_path / "peft" / WEIGHTS), load_file(tmp_path / "sglang" / WEIGHTS)
    assert fused[f"{at}.base_layer.lora_A.weight"][:, 0].tolist() == [1, 1, 2, 2, 3, 3]
    assert fused[f"{at}.base_layer.lora_B.weight"][:, :4].tolist() == 6 * [[1, 2, 3, 1]] + 6 * [[11, 12, 13, 11]]
    assert fused[f"{at}.lora_A.weight"].shape == (6, 6)
    assert stacked[f"{at}.gate_up_proj.lora_B.weight"][2, :, 0].tolist() == 6 * [3] + 6 * [13]
    assert [value.shape for value in stacked.values() if value.shape[1] == 4] == [(3, 4, 2)]
    assert json.loads((tmp_path / "peft" / SETTINGS).read_text())["target_parameters"] == list(TARGETS)
    assert not audit(tmp_path / "peft").findings


def test_convert_reads_stacked_tensors_under_the_names_of_peft(layouts: Path, tmp_path: Path):
    def stack(tensors: Tensors) -> None:
        for name in [name for name in tensors if "experts" in name]:
            value = tensors[name]
            tensors[name] = value.view(8, 4, -1) if "lora_A" in name else value.view(len(value), 4, 8)

    convert(changed(layouts / "peft", tmp_path / "stacked", stack), tmp_path / "peft", "peft")
    assert (tmp_path / "peft" / WEIGHTS).read_bytes() == (layouts / "peft" / WEIGHTS).read_bytes()


def test_convert_keeps_which_layers_have_which_adapters(tmp_path: Path):
    targets = ["layers.0.mlp.experts.gate_up_proj", "layers.1.mlp.experts.down_proj"]
    save_adapter(tmp_path, "qwen3_moe", target_parameters=targets)
    convert(tmp_path / "peft", tmp_path / "vllm", "vllm", tmp_path / "base")
    assert convert(tmp_path / "vllm", tmp_path / "back", "peft", tmp_path / "base") == 2 * 8
    assert (tmp_path / "back" / WEIGHTS).read_bytes() == (tmp_path / "peft" / WEIGHTS).read_bytes()
    assert settings_of(tmp_path / "back")["target_parameters"] == [f"model.{name}" for name in targets]


def test_convert_leaves_adapters_of_shared_experts(tmp_path: Path):
    save_adapter(tmp_path, "qwen2_moe", target_modules=["q_proj", "gate_proj"])
    convert(tmp_path / "peft", tmp_path / "vllm", "vllm", tmp_path / "base")
    convert(tmp_path / "vllm", tmp_path / "back", "peft", tmp_path / "base")
    assert (tmp_path / "back" / WEIGHTS).read_bytes() == (tmp_path / "peft" / WEIGHTS).read_bytes()
    assert settings_of(tmp_path / "back") == settings_of(tmp_path / "peft")
    assert settings_of(tmp_path / "vllm")["target_modules"] == ["down_proj", "gate_proj", "q_proj", "up_proj"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"modules_to_save": ["mlp.gate"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"peft_version": "0.18.0"}, "an old version of PEFT"),
        ({"lora_B_layout": "grouped_by_expert"}, "another order of experts"),
        ({"target_modules": ".*q_proj"}, "target_modules is a pattern"),
        ({"target_parameters": [*TARGETS, "q_proj.weight"]}, "'q_proj.weight' is not a parameter of experts"),
        ({"target_parameters": [TARGETS[0]]}, "has 2 adapters for 1 target_parameters"),
        ({"r": 8}, "not all of 8 experts"),
        ({"r": 3}, "rank 3 does not divide"),
        ({"r": 10**9}, "r: Input should be less than"),
        ({"r": True}, "r: Input should be a valid integer"),
        ({"lora_alpha": float("nan")}, "lora_alpha"),
        ({"target_parameters": 5}, "target_parameters: Input should be a valid list"),
    ],
)
def test_convert_refuses_settings_that_another_layout_cannot_express(
    settings: dict[str, Any], words: str, layouts: Path, tmp_path: Path
):
    source = changed(layouts / "peft", tmp_path / "changed", **settings)
    with pytest.raises(UserError, match=words):
        convert(source, tmp_path / "out", "vllm", layouts / "base")
    assert not (tmp_path / "out").exists()


def without(*parts: str) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        for name in [name for name in tensors if all(part in name for part in parts)]:
            del tensors[name]

    return edit


def rename_leaf(tensors: Tensors) -> None:
    for name in [name for name in tensors if ".down_proj." in name]:
        tensors[name.replace(".down_proj.", ".out_proj.")] = tensors.pop(name)


def change_a(tensors: Tensors) -> None:
    tensors["base_model.model.model.layers.1.mlp.experts.2.up_proj.lora_A.weight"] += 1


def halve_a_rank(tensors: Tensors) -> None:
    at = "base_model.model.model.layers.1.mlp.experts.2.down_proj"
    tensors[f"{at}.lora_A.weight"] = tensors[f"{at}.lora_A.weight"][:2].clone()
    tensors[f"{at}.lora_B.weight"] = tensors[f"{at}.lora_B.weight"][:, :2].clone()


def share_a(tensors: Tensors) -> None:
    for name in [name for name in tensors if "gate_up_proj.lora_A" in name]:
        tensors[name] = tensors[name][:1].clone()


def cast_an_expert(tensors: Tensors) -> None:
    name = "base_model.model.model.layers.1.mlp.experts.2.down_proj.lora_B.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)


def cast_ups(tensors: Tensors) -> None:
    for name in [name for name in tensors if ".up_proj." in name]:
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)


def drop_a_row(tensors: Tensors) -> None:
    for name in [name for name in tensors if "gate_up_proj.lora_B" in name]:
        tensors[name] = tensors[name][:, 1:].clone()


def bias(tensors: Tensors) -> None:
    tensors["base_model.model.model.layers.0.mlp.experts.0.down_proj.lora_B.bias"] = torch.ones(16)


@pytest.mark.parametrize(
    ("layout", "edit", "words"),
    [
        ("vllm", change_a, "different lora_A"),
        ("vllm", rename_leaf, "adapters of out_proj, which the base does not have"),
        ("vllm", without(".experts.7."), "not all of 8 experts"),
        ("vllm", without("layers.1", ".3.up_proj.lora_B"), "up_proj: not all of 8 experts"),
        ("vllm", without(".up_proj."), "not all of its linear layers"),
        ("vllm", without(".experts."), "has no adapters of experts"),
        ("vllm", halve_a_rank, "not all experts have one type and the rank 4"),
        ("vllm", cast_an_expert, "down_proj: not all experts have one type"),
        ("vllm", cast_ups, "different lora_A or types"),
        ("vllm", bias, "not all of 8 experts"),
        ("sglang", without("layers.1", "down_proj.lora_B"), "down_proj: not all of 8 experts"),
        ("sglang", drop_a_row, "do not fit gate_up_proj"),
        ("sglang", share_a, "gate_up_proj: not all of 8 experts"),
    ],
)
def test_convert_refuses_tensors_that_another_layout_cannot_express(
    layout: str,
    edit: Callable[[Tensors], None],
    words: str,
    layouts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    source, target = changed(layouts / layout, tmp_path / "changed", edit), tmp_path / "out"
    to = "vllm" if layout == "sglang" else "peft"
    assert main(["adapter", "convert", str(source), str(target), "--to", to, "--base", str(layouts / "base")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
    assert not target.exists()


@pytest.mark.parametrize(
    ("to", "model_type", "words"),
    [("vllm", "gpt_oss", "vLLM reads PEFT's layout"), ("vllm", "nemotron_h", "do not fit gate_up_proj")],
)
def test_convert_with_another_base_raises(to: str, model_type: str, words: str, layouts: Path, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "num_experts": 8}))
    with pytest.raises(UserError, match=words):
        convert(layouts / "peft", tmp_path / "out", to, tmp_path)
    with pytest.raises(UserError, match="exists"):
        convert(layouts / "peft", layouts / "sglang", "sglang")


def test_convert_that_changes_an_update_raises_and_writes_nothing(
    layouts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def rolled(rows: Tensor, form: str) -> Tensor:
        return rows.roll(1, 0).flatten(0, 1) if form == "joined" else rows.permute(1, 2, 0).flatten(1)

    monkeypatch.setattr(conversion, "as_in_files", rolled)
    with pytest.raises(AssertionError, match="the adapters changed"):
        convert(layouts / "sglang", tmp_path / "out", "peft")
    assert not (tmp_path / "out").exists()


def test_convert_keeps_values_that_are_not_finite(layouts: Path, tmp_path: Path):
    def break_value(tensors: Tensors) -> None:
        tensors["base_model.model.model.layers.0.mlp.experts.lora_A.weight"][0, 0] = float("nan")

    convert(changed(layouts / "peft", tmp_path / "changed", break_value), tmp_path / "sglang", "sglang")
    (name,) = (name for name, value in load_file(tmp_path / "sglang" / WEIGHTS).items() if value.isnan().any())
    assert name.endswith("layers.0.mlp.experts.down_proj.lora_A.weight")
