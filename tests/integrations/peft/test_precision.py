"""A base in bfloat16 with adapters in float32, as PEFT makes them: spread over processes, and saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.integrations.peft.models import rows
from tests.integrations.transformers.families import awaken, config, tokens
from tests.support.helpers import run_distributed
from toolkit.integrations.transformers import causal_lm, save_pretrained

FAMILIES, SAMPLES, STEPS = ("mixtral", "gpt_oss"), 8, 3


def train(folder: Path, family: str, dtype: torch.dtype, ours: bool) -> dict[str, Any]:
    """Of stock PEFT where not `ours`: adapters' gradients of the first step, losses, and the types of parameters."""
    from accelerate import Accelerator
    from peft import LoraConfig, get_peft_model

    from toolkit.integrations.accelerate.expert_parallel import ExpertParallel

    torch.manual_seed(0)
    # The same numbers in both types.
    model: Any = awaken(causal_lm(config(family))).to(torch.bfloat16).to(dtype)
    torch.manual_seed(1)
    matrices = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    settings = LoraConfig(
        r=8, lora_alpha=16, target_modules=["q_proj"], target_parameters=matrices, init_lora_weights=False
    )
    model = inner = get_peft_model(model, settings)
    optimizer: Any = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    accelerator, world, rank = Accelerator(cpu=True), 1, 0
    if ours:
        model, optimizer = ExpertParallel(accelerator).prepare(model, optimizer)
        world, rank = accelerator.num_processes, accelerator.process_index
    losses, grads = [], {}
    for step in range(STEPS):
        ids = tokens(step, SAMPLES)[rank * SAMPLES // world :][: SAMPLES // world]
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        grads = grads or {name: grad for name, grad in rows(inner, grads=True).items() if "experts" in name}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach().float(), "mean")) if ours else float(loss.detach()))
    if ours:
        save_pretrained(model, folder / family)
    names = dict(inner.named_parameters())
    return {
        "losses": losses,
        "grads": grads,
        "base": {str(p.dtype) for name, p in names.items() if "lora" not in name},
        "adapters": {str(p.dtype) for name, p in names.items() if "lora" in name},
    }


def train_all(folder: Path, kinds: dict[str, tuple[torch.dtype, bool]]) -> list[dict[str, dict[str, Any]]]:
    from transformers.utils import logging

    logging.set_verbosity_error()
    return [{kind: train(folder, family, *settings) for kind, settings in kinds.items()} for family in FAMILIES]


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Relative, over all tensors."""
    assert found.keys() == expected.keys()
    squares = sum(float((found[name] - value).float().square().sum()) for name, value in expected.items())
    return (squares / sum(float(value.float().square().sum()) for value in expected.values())) ** 0.5


def test_two_processes_learn_as_close_to_one_as_bfloat16_is_to_float32(tmp_path: Path):
    alone = {"stock": (torch.bfloat16, False), "twin": (torch.float32, False)}
    (singles,) = run_distributed(train_all, 1, tmp_path, alone)
    both = run_distributed(train_all, 2, tmp_path, {"ours": (torch.bfloat16, True)})
    for family, single, *ranks in zip(FAMILIES, singles, *both, strict=True):
        stock, twin = single["stock"], single["twin"]
        rounding = distance(stock["grads"], twin["grads"])
        assert 0 < rounding < 0.2, "the twin is no measure"
        together = {name: row for rank in ranks for name, row in rank["ours"]["grads"].items()}
        assert distance(together, stock["grads"]) < 2 * rounding
        assert distance(together, twin["grads"]) < 2 * rounding
        for rank in (each["ours"] for each in ranks):
            for loss, expected in zip(rank["losses"], stock["losses"], strict=True):
                assert abs(loss / expected - 1) < 1e-2
            assert rank["base"] == {"torch.bfloat16"}
            assert rank["adapters"] == {"torch.float32"}
            assert all(row.dtype == torch.float32 for row in rank["grads"].values())
        saved = load_file(tmp_path / family / "adapter_model.safetensors")
        assert {value.dtype for value in saved.values()} == {torch.float32}
