"""Conversion of expert adapters between the layouts of PEFT, vLLM and SGLang."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.integrations.peft.models import config
from toolkit.commands import main
from toolkit.errors import UserError
from toolkit.integrations.peft.layouts import convert
from toolkit.integrations.transformers import causal_lm

FAMILIES = ("olmoe", "mixtral")
WEIGHTS = "adapter_model.safetensors"
TARGETS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


@pytest.fixture(scope="module", params=FAMILIES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from peft import LoraConfig, get_peft_model

    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    base = causal_lm(config(request.param)).double()
    base.save_pretrained(folder / "base")
    settings = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], target_parameters=list(TARGETS))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of transformers, for what PEFT asks
        model: Any = get_peft_model(base, settings)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_()
    model.save_pretrained(folder / "peft")
    state = model.merge_and_unload().state_dict()
    save_file({name: value.clone() for name, value in state.items() if ".experts." in name}, folder / "merged")
    return folder


def settings_of(folder: Path) -> dict[str, Any]:
    """The settings with lists that PEFT keeps as sets in one order."""
    settings: dict[str, Any] = json.loads((folder / "adapter_config.json").read_text())
    return {name: sorted(value) if isinstance(value, list) else value for name, value in settings.items()}


@pytest.mark.parametrize("layout", ["vllm", "sglang"])
def test_convert_there_and_back_gives_the_same_bytes(layout: str, saved: Path, tmp_path: Path):
    assert convert(saved / "peft", tmp_path / "there", layout, saved / "base") == 2 * 2 * 8
    convert(tmp_path / "there", tmp_path / "back", "peft", saved / "base")
    assert (tmp_path / "back" / WEIGHTS).read_bytes() == (saved / "peft" / WEIGHTS).read_bytes()
    assert settings_of(tmp_path / "back") == settings_of(saved / "peft")


def test_converted_adapters_merge_to_the_weights_that_peft_merges(saved: Path, tmp_path: Path):
    convert(saved / "peft", tmp_path / "vllm", "vllm", saved / "base")
    base, merged, adapters = (
        causal_lm(saved / "base"),
        load_file(saved / "merged"),
        load_file(tmp_path / "vllm" / WEIGHTS),
    )
    linears = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}
    module = "block_sparse_moe"
    if not any(module in name for name in adapters):
        linears, module = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}, "mlp"
    compared = 0
    for name, weight in base.double().state_dict().items():
        parameter = name.rpartition(".")[2]
        if ".experts." not in name or parameter not in linears:
            continue
        at = f"base_model.model.{name.rpartition('.')[0]}".replace(".mlp.", f".{module}.")
        for expert, own in enumerate(weight):
            pairs = [[adapters[f"{at}.{expert}.{n}.lora_{m}.weight"] for m in "BA"] for n in linears[parameter]]
            update = torch.cat([b @ a for b, a in pairs])
            torch.testing.assert_close(own + 2.0 * update, merged[name][expert], rtol=1e-12, atol=1e-12)
            compared += 1
    assert compared == 2 * 2 * 8


def test_convert_reads_a_file_written_by_hand_in_the_layout_of_vllm(saved: Path, tmp_path: Path):
    convert(saved / "peft", tmp_path / "vllm", "vllm", saved / "base")
    by_hand = {name: torch.full_like(value, 2.0) for name, value in load_file(tmp_path / "vllm" / WEIGHTS).items()}
    layer = next(name for name in by_hand if "layers.1" in name and ".experts.5." in name and "lora_B" in name)
    by_hand[layer] = torch.full_like(by_hand[layer], 7.0)
    save_file(by_hand, tmp_path / "vllm" / WEIGHTS)
    convert(tmp_path / "vllm", tmp_path / "sglang", "sglang", saved / "base")
    stacked = load_file(tmp_path / "sglang" / WEIGHTS)
    sevens = {name: value.eq(7).flatten(1).any(1).nonzero().flatten().tolist() for name, value in stacked.items()}
    assert [(name.split(".experts.")[0][-12:-4], found) for name, found in sevens.items() if found] == [
        ("layers.1", [5])
    ]


def change(folder: Path, target: Path, **settings: Any) -> dict[str, torch.Tensor]:
    """Copy an adapter with other settings; return its tensors."""
    target.mkdir()
    (target / "adapter_config.json").write_text(json.dumps(settings_of(folder) | settings))
    tensors = load_file(folder / WEIGHTS)
    save_file(tensors, target / WEIGHTS)
    return tensors


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"peft_version": "0.18.0"}, "PEFT before 0.19.1"),
        ({"r": "4"}, "not of a LoRA adapter"),
        ({"target_parameters": [TARGETS[0]]}, "target_parameters do not fit"),
    ],
)
def test_convert_refuses_settings_that_another_layout_cannot_express(
    settings: dict[str, Any], words: str, saved: Path, tmp_path: Path
):
    change(saved / "peft", tmp_path / "changed", **settings)
    with pytest.raises(UserError, match=words):
        convert(tmp_path / "changed", tmp_path / "out", "sglang")
    assert not (tmp_path / "out").exists()


def test_convert_refuses_linear_layers_with_different_matrices(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    convert(saved / "peft", tmp_path / "vllm", "vllm", saved / "base")
    tensors = load_file(tmp_path / "vllm" / WEIGHTS)
    tensors[next(name for name in tensors if ".2." in name and ("w3" in name or "up_" in name) and "A" in name)] += 1
    save_file(tensors, tmp_path / "vllm" / WEIGHTS)
    words = ["adapter", "convert", str(tmp_path / "vllm"), str(tmp_path / "out"), "--to", "peft"]
    assert main([*words, "--base", str(saved / "base")]) == 2
    assert "different lora_A" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
