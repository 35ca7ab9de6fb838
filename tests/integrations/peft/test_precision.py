"""A bfloat16 base with float32 adapters, sharded over processes and saved."""

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.support.families import model_of
from benchmarks.support.processes import run_distributed
from tests.integrations.peft.models import add_adapters, rows, together
from tests.integrations.transformers.training import adamw, train_step
from toolkit.integrations.accelerate.expert_parallel import ExpertParallel
from toolkit.integrations.transformers import save_pretrained

FAMILIES, STEPS = ("mixtral", "gpt_oss"), 3


def train(folder: Path, family: str, dtype: torch.dtype, shards: bool) -> dict[str, Any]:
    """Return losses, adapter gradients of the first step, and parameter types, with sharded experts or without."""
    base = model_of(family).to(torch.bfloat16).to(dtype)  # both dtypes have the same values
    model = inner = add_adapters(base, r=8, lora_alpha=16, init_lora_weights=False)
    accelerator, optimizer, grads = Accelerator(cpu=True), adamw(model, 1e-3), []
    optimizer.register_step_pre_hook(lambda *_: grads.append(rows(inner, grads=True)))
    if shards:
        model, optimizer = ExpertParallel(accelerator).prepare(model, optimizer)
    losses = [train_step(accelerator, model, optimizer, step) for step in range(STEPS)]
    if shards:
        save_pretrained(model, folder / family)
    dtypes: dict[bool, set[torch.dtype]] = {False: set(), True: set()}
    for name, parameter in inner.named_parameters():
        dtypes["lora" in name].add(parameter.dtype)
    expert_grads = {name: grad for name, grad in grads[0].items() if "experts" in name}
    return {"losses": losses, "grads": expert_grads, "base": dtypes[False], "adapters": dtypes[True]}


def train_all(folder: Path, dtypes: list[torch.dtype], shards: bool) -> list[list[dict[str, Any]]]:
    from transformers.utils import logging

    logging.set_verbosity_error()
    return [[train(folder, family, dtype, shards) for dtype in dtypes] for family in FAMILIES]


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the relative distance over all tensors."""
    assert found.keys() == expected.keys()
    squares = sum(float((found[name] - value).float().square().sum()) for name, value in expected.items())
    return (squares / sum(float(value.float().square().sum()) for value in expected.values())) ** 0.5


def test_sharded_bfloat16_base_equals_one_process_within_rounding(tmp_path: Path):
    (singles,) = run_distributed(train_all, 1, tmp_path, [torch.bfloat16, torch.float32], False)
    sharded = run_distributed(train_all, 2, tmp_path, [torch.bfloat16], True)
    for family, (single, in_float32), *ranks in zip(FAMILIES, singles, *sharded, strict=True):
        rounding = distance(single["grads"], in_float32["grads"])
        assert 0 < rounding < 0.2
        grads = together([rank["grads"] for (rank,) in ranks])
        assert distance(grads, single["grads"]) < 2 * rounding
        assert distance(grads, in_float32["grads"]) < 2 * rounding
        for (rank,) in ranks:
            for loss, expected in zip(rank["losses"], single["losses"], strict=True):
                assert abs(loss / expected - 1) < 1e-2
            assert rank["base"] == {torch.bfloat16}
            assert rank["adapters"] == {torch.float32}
            assert all(row.dtype == torch.float32 for row in rank["grads"].values())
        saved = load_file(tmp_path / family / "adapter_model.safetensors")
        assert {value.dtype for value in saved.values()} == {torch.float32}
