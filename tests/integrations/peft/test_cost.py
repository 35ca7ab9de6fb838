"""Frozen experts with adapters have no weight gradients, and no tensors of their size are allocated."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.support.families import config
from tests.integrations.peft.models import adapted, add_adapters
from tests.integrations.transformers.training import prepare
from toolkit.integrations.transformers import causal_lm, experts_modules, use_toolkit_kernel, watch_routers
from toolkit.integrations.transformers.kernel import feed_forward

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # raised by PEFT

EXPERTS, WIDTH = 32, 32


def profiled(work: Any) -> Any:
    with torch.profiler.profile(profile_memory=True) as profile:
        work()
    return profile


def largest_allocations(folder: Path) -> list[int]:
    """Return the largest allocation of a forward and backward pass with unmodified PEFT, and with sharded experts."""
    from transformers import Qwen3MoeConfig

    sizes = {"hidden_size": WIDTH, "intermediate_size": WIDTH, "moe_intermediate_size": WIDTH, "head_dim": 8}
    few = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 16}
    settings = Qwen3MoeConfig(**sizes, **few, num_experts=EXPERTS, num_experts_per_tok=2)
    found = []
    for shards in (False, True):
        model: Any = add_adapters(causal_lm(settings, experts_implementation="grouped_mm"), r=4)
        if shards:
            prepare(model)
        ids = torch.arange(8).unsqueeze(0)
        model(input_ids=ids, labels=ids).loss.backward()  # allocates gradients
        profile = profiled(lambda: model(input_ids=ids, labels=ids).loss.backward())  # noqa: B023
        profile.export_chrome_trace(str(folder / "trace.json"))
        events = json.loads((folder / "trace.json").read_text())["traceEvents"]
        found.append(max(event["args"]["Bytes"] for event in events if event.get("name") == "[memory]"))
    return found


def test_adapters_allocate_no_tensor_of_expert_weights_size(tmp_path: Path):
    unmodified, sharded = largest_allocations(tmp_path)
    weights = EXPERTS * 2 * WIDTH * WIDTH * 4
    assert unmodified >= weights
    assert sharded < weights / 4


@pytest.mark.parametrize(("trained", "products"), [(True, 6), (False, 4)])
def test_frozen_experts_compute_no_weight_gradients(trained: bool, products: int):
    use_toolkit_kernel()
    model = causal_lm(config("mixtral"), experts_implementation="toolkit")
    experts: Any = next(iter(experts_modules(model).values()))
    experts.requires_grad_(trained)
    x, rows_per_slot = torch.randn(16, 16, requires_grad=True), torch.tensor([3, 0, 4, 1, 2, 0, 5, 1])
    profile = profiled(lambda: feed_forward(experts, x, rows_per_slot).sum().backward())
    assert sum(event.name == "aten::_grouped_mm" for event in profile.events()) == products


def test_watch_routers_finds_routers_with_adapters():
    model = adapted("qwen3_moe", target_parameters=["mlp.experts.down_proj", "mlp.gate.weight"])
    assert len(watch_routers(model)) == 2
    prepare(model)
    watches = watch_routers(model)
    model(input_ids=torch.arange(8).unsqueeze(0))
    assert [int(each.last_load_E.sum()) for each in watches] == [16, 16]
