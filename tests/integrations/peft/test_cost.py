"""What frozen experts with adapters cost: no gradient of their weights, and nothing as large as these."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.peft.models import adapted
from tests.support.helpers import run_distributed
from toolkit.experts.sharding.call import slots_of_rows
from toolkit.integrations.transformers import causal_lm, experts_modules, use_toolkit_kernel, watch_routers

EXPERTS, WIDTH = 32, 32


def profiled(work: Any) -> Any:
    with torch.profiler.profile(profile_memory=True) as profile:
        work()
    return profile


def allocations(folder: Path, kind: str) -> tuple[int, int]:
    """The largest allocation of a forward and backward, and the bytes of the experts' larger matrices."""
    from accelerate import Accelerator
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen3MoeConfig

    from toolkit.integrations.accelerate.expert_parallel import ExpertParallel

    sizes = {"hidden_size": WIDTH, "intermediate_size": WIDTH, "moe_intermediate_size": WIDTH, "head_dim": 8}
    few = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 16}
    settings = Qwen3MoeConfig(**sizes, **few, num_experts=EXPERTS, num_experts_per_tok=2)
    model: Any = causal_lm(settings, experts_implementation="grouped_mm")
    matrices = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], target_parameters=matrices))
    optimizer: Any = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    if kind == "ours":
        ExpertParallel(Accelerator(cpu=True)).prepare(model, optimizer)
    ids = torch.arange(8).unsqueeze(0)
    model(input_ids=ids, labels=ids).loss.backward()  # gradients are there
    profile = profiled(lambda: model(input_ids=ids, labels=ids).loss.backward())
    profile.export_chrome_trace(str(folder / f"{kind}.json"))
    events = json.loads((folder / f"{kind}.json").read_text())["traceEvents"]
    sizes_of = [event["args"]["Bytes"] for event in events if event.get("name") == "[memory]"]
    return max(sizes_of), EXPERTS * 2 * WIDTH * WIDTH * 4


def test_no_tensor_as_large_as_the_weights_of_experts_is_made(tmp_path: Path):
    ((stock, weights),) = run_distributed(allocations, 1, tmp_path, "stock")
    ((ours, _),) = run_distributed(allocations, 1, tmp_path, "ours")
    assert stock >= weights, "stock PEFT makes none, so nothing was shown"
    assert ours < weights / 4


@pytest.mark.parametrize(("trained", "products"), [(True, 6), (False, 4)])
def test_frozen_experts_have_no_products_for_their_gradients(trained: bool, products: int):
    from tests.integrations.transformers.families import config

    use_toolkit_kernel()
    model = causal_lm(config("mixtral"), experts_implementation="toolkit")
    experts: Any = next(iter(experts_modules(model).values()))
    experts.requires_grad_(trained)
    rows_per_slot = torch.tensor([3, 0, 4, 1, 2, 0, 5, 1])
    x = torch.randn(16, 16, requires_grad=True)
    slots, weights = slots_of_rows(rows_per_slot, 16), torch.ones(16, 1)
    profile = profiled(lambda: experts(x, slots, weights).sum().backward())
    assert sum(event.name == "aten::_grouped_mm" for event in profile.events()) == products


def watched() -> list[int]:
    """How many routers are found under PEFT's wrappers, and assignments counted, before and after prepare."""
    from accelerate import Accelerator

    from toolkit.integrations.accelerate.expert_parallel import ExpertParallel

    model = adapted("qwen3_moe", target_parameters=["mlp.experts.down_proj", "mlp.gate.weight"])
    found = [len(watch_routers(model))]
    optimizer: Any = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    ExpertParallel(Accelerator(cpu=True)).prepare(model, optimizer)
    watches = watch_routers(model)
    model(input_ids=torch.arange(8).unsqueeze(0))
    return [*found, len(watches), *(int(watch.last_load_E.sum()) for watch in watches)]


def test_routers_are_found_beside_experts_with_adapters():
    assert run_distributed(watched, 1) == [[2, 2, 16, 16]]
