"""The rules of PEFT's, vLLM's and SGLang's loaders that conversions follow: `make test-loaders`.

The needed files of both servers' wheels are read from the package index, and parts of them executed.
"""

import __future__

import ast
import dataclasses
import json
import math
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import fsspec
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.audit.adapters import WEIGHTS
from tests.audit.test_convert import updates
from toolkit.audit.convert import CONVERTED, OFF, VLLM_STACKED, scaling_of

Wheels = dict[str, zipfile.ZipFile]
loaders = pytest.mark.loaders
PINNED = "vllm==0.33.0 sglang==0.5.23"
CLASS = re.compile(r"^class (\w+)(?:\(([^)]*)\))?:(.*?)(?=^\S|\Z)", re.MULTILINE | re.DOTALL)
RAISE = """alora_invocation_tokens alpha_pattern arrow_config corda_config ensure_weight_tying fan_in_fan_out
kasa_config layer_replication loftq_config lora_bias lora_ga_config megatron_config modules_to_save monteclora_config
trainable_token_indices use_bdlora use_dora use_qalora velora_config"""
"""Settings of PEFT that change the base or the outputs of adapters."""
AT = "model.layers.1.mlp.experts"


@pytest.fixture(scope="module")
def wheels() -> Wheels:
    words = "pip install --dry-run --no-deps --ignore-installed --only-binary :all: --quiet --report -"
    versions = os.environ.get("LOADERS") or PINNED
    report = json.loads(subprocess.check_output([sys.executable, "-m", *words.split(), *versions.split()]))
    urls = {each["metadata"]["name"]: each["download_info"]["url"] for each in report["install"]}
    settings = {"block_size": 2**20, "client_kwargs": {"trust_env": True}}  # read by ranges, with the proxy of pip
    return {name: zipfile.ZipFile(fsspec.open(url, **settings).open()) for name, url in urls.items()}


def definition(wheel: zipfile.ZipFile, file: str, name: str) -> Any:
    nodes = ast.walk(ast.parse(wheel.read(file)))
    return next(each for each in nodes if isinstance(each, ast.ClassDef | ast.FunctionDef) and each.name == name)


def execute(wheel: zipfile.ZipFile, file: str, name: str, **names: Any) -> Any:
    """Return a class or function of a file, which sees `names` instead of the file's imports."""
    module = ast.Module([definition(wheel, file, name)], [])
    exec(compile(module, file, "exec", __future__.annotations.compiler_flag), names)
    return names[name]


def test_settings_of_installed_peft_are_converted_or_raise():
    from peft import LoraConfig

    names = {each.name for each in dataclasses.fields(LoraConfig)}
    assert CONVERTED - names == {"lora_B_layout"}  # Unsloth's
    assert names - CONVERTED - OFF.keys() == set(RAISE.split())


@loaders
@pytest.mark.parametrize("use_rslora", [False, True])
def test_scaling_equals_loaders(use_rslora: bool, wheels: Wheels):
    settings = {"r": 16, "lora_alpha": 8, "target_modules": ["q_proj"], "use_rslora": use_rslora}
    names = vars(dataclasses) | {"math": math, "logger": Mock()}
    helper = execute(wheels["vllm"], "vllm/lora/peft_helper.py", "PEFTHelper", **names)
    assert helper.from_dict(settings).vllm_lora_scaling_factor == scaling_of(settings, "vllm")
    config = execute(wheels["sglang"], "sglang/srt/lora/lora_config.py", "LoRAConfig")(config_dict=settings)
    nodes = ast.walk(definition(wheels["sglang"], "sglang/srt/lora/lora.py", "LoRAAdapter"))
    (rule,) = [each for each in nodes if isinstance(each, ast.stmt) and ast.unparse(each).startswith("self.scaling")]
    adapter = SimpleNamespace(config=config)
    assert eval(ast.unparse(rule.value), {"self": adapter, "math": math}) == scaling_of(settings, "sglang")  # type: ignore[attr-defined]


@loaders
def test_stacked_families_equal_vllm(wheels: Wheels):
    wheel, folder = wheels["vllm"], "vllm/model_executor/models/"
    texts = [wheel.read(name).decode() for name in wheel.namelist() if re.fullmatch(rf"{folder}\w+\.py", name)]
    classes = {name: (bases, body) for text in texts for name, bases, body in CLASS.findall(text)}

    def is_stacked(name: str) -> bool:
        bases, body = classes.get(name, ("", ""))
        return bool(re.search(r"is_3d_moe_weight\b.*= True", body)) or any(map(is_stacked, re.findall(r"\w+", bases)))

    registry = re.findall(r'"(\w+)": \(\s*"\w+",\s*"(\w+)"', wheel.read(f"{folder}registry.py").decode())
    found = {re.sub("_|For.*", "", architecture).lower() for architecture, name in registry if is_stacked(name)}
    found.discard("clefomni")  # has the model type of Qwen3-Omni
    assert found == {family.replace("_", "") for family in VLLM_STACKED}


@loaders
def test_vllm_expects_converted_names(layouts: Path, wheels: Wheels):
    parse = execute(wheels["vllm"], "vllm/lora/utils.py", "parse_fine_tuned_lora_name")
    file = "vllm/model_executor/layers/fused_moe/routed_experts.py"
    placement = SimpleNamespace(build_initial_global_physical_to_logical_map=lambda experts, _: range(experts))
    mapping = execute(wheels["vllm"], file, "build_expert_params_mapping", EplbState=placement)
    expected = {name.rstrip(".") for _, name, *_ in mapping("gate_proj", "down_proj", "up_proj", 8)}
    modules = {parse(name)[0] for name in load_file(layouts / "vllm" / WEIGHTS) if ".experts." in name}
    assert {module[module.find("experts") :] for module in modules} == expected


def require_equal(gate_up: Tensor, down: Tensor, folder: Path) -> None:
    """Compare the updates of a layer, without the scaling of 2, with those of `folder`."""
    expected = {name.rpartition(".")[2]: value for name, value in updates(folder).items() if "layers.1.mlp" in name}
    torch.testing.assert_close(2 * gate_up, torch.cat([expected["w1"], expected["w3"]], 1), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(2 * down, expected["w2"], rtol=1e-12, atol=1e-12)


@loaders
def test_vllm_stacks_updates_of_peft(layouts: Path, wheels: Wheels):
    tensors, loras = load_file(layouts / "peft" / WEIGHTS), {}
    for name in (AT, f"{AT}.base_layer"):
        a, b = (tensors[f"base_model.model.{name}.lora_{matrix}.weight"] for matrix in "AB")
        loras[name] = SimpleNamespace(lora_a=a, lora_b=b)
    stack = execute(wheels["vllm"], "vllm/lora/model_manager.py", "_stack_moe_lora_weights", torch=torch)
    manager = SimpleNamespace(_is_3d_moe_model=True, _get_lora_layer_weights=lambda model, name: model.loras[name])
    module = SimpleNamespace(w13_lora_a_stacked=[torch.empty(1, 8)], global_num_experts=8, ep_rank=0)
    stack(manager, SimpleNamespace(loras=dict(loras)), module, AT)
    require_equal(*(b @ a for a, b in zip(loras[AT].lora_a, loras[AT].lora_b, strict=True)), layouts / "peft")


@loaders
def test_sglang_reads_converted_updates(layouts: Path, wheels: Wheels):
    weights = {name: value for name, value in load_file(layouts / "sglang" / WEIGHTS).items() if AT in name}
    normalize = execute(wheels["sglang"], "sglang/srt/lora/lora.py", "normalize_gate_up_proj", torch=torch)
    normalize(None, list(weights), weights)
    down_a, down_b, a, b = (weights[name] for name in sorted(weights))
    gate_up = [y @ x for x, y in zip(a.chunk(2, 1), b.chunk(2, 1), strict=True)]
    require_equal(torch.cat(gate_up, 1), down_b @ down_a, layouts / "sglang")
