"""Expected memory of fine-tuning against the measured memory of the same step."""

from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.support.accelerators import make_accelerator
from benchmarks.support.families import EXPERTS, config
from benchmarks.support.peak_memory import peak_bytes
from benchmarks.support.processes import run_distributed
from toolkit.experts.parallel.groups import ExpertGroups
from toolkit.experts.parallel.ownership import local_rows
from toolkit.experts.sharding.find import experts_modules
from toolkit.experts.sharding.shard import shard_experts
from toolkit.integrations.accelerate.expert_parallel import ExpertParallel
from toolkit.integrations.peft.adapter_options import AdapterOptions
from toolkit.integrations.peft.adapters import add_adapters
from toolkit.integrations.transformers import causal_lm, use_toolkit_kernel
from toolkit.integrations.transformers.language_models import recompute_blocks
from toolkit.train.expected_memory import ExpectedMemory, _Allocated, expected_memory
from toolkit.train.fine_tuning_memory import Layout, block_memory, exact_memory, fine_tuning_memory
from toolkit.train.tasks.language_modeling import LanguageModeling

ADAPT = partial(add_adapters, options=AdapterOptions(lora_rank=2))


def layout(**changes: Any) -> Layout:
    return Layout(**{"ep_size": 1, "sequences": 2, "context": 16, "dtype": torch.float32} | changes)


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True)


def measured(asked: Layout, family: str) -> ExpectedMemory:
    """Return the memory of a step of the materialized model."""
    model: Any = causal_lm(config(family), dtype=asked.dtype, experts_implementation=use_toolkit_kernel())
    if asked.gradient_checkpointing:
        recompute_blocks(model)
    model = ADAPT(model).train()
    shard_experts(model, ExpertGroups())
    optimizer = adamw(model)
    tokens = torch.randint(3, 60, (asked.sequences, asked.context + 1))
    with _Allocated() as allocated:
        for each in (*model.parameters(), *model.buffers()):
            each.view(-1)  # counts the storage
        weights = allocated.now
        LanguageModeling().loss(model, {"tokens": tokens.clone()}).total.backward()
        step = allocated.most - weights
        optimizer.step()
    state = sum(value.nbytes for each in optimizer.state.values() for value in each.values())
    return ExpectedMemory(weights, state, step)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_expected_memory_equals_measured_memory(family, gradient_checkpointing):
    asked = layout(gradient_checkpointing=gradient_checkpointing)
    expected, found = exact_memory(config(family), asked, ADAPT, adamw), measured(asked, family)
    assert (expected.weights, expected.optimizer) == (found.weights, found.optimizer)
    assert expected.step == pytest.approx(found.step, rel=0.02)
    closed = fine_tuning_memory(config(family), asked, ADAPT, adamw)
    assert closed.weights == found.weights
    assert closed.optimizer == pytest.approx(found.optimizer, rel=0.01)
    assert closed.total == pytest.approx(found.total, rel=0.1)


def test_expected_memory_by_ep_size_quantization_and_offload():
    expect = partial(fine_tuning_memory, config("qwen3_moe"), adapt=ADAPT)
    full, half = expect(layout=layout()), expect(layout=layout(ep_size=2))
    layers = experts_modules(causal_lm(config("qwen3_moe"))).values()
    experts = sum(parameter.nbytes for module in layers for parameter in module.parameters())
    frozen = full.weights - half.weights
    assert frozen > experts / 2  # plus adapters
    assert half.loading == full.loading / 2 == experts / len(layers) / 2  # one layer, held twice
    with mock.patch("toolkit.train.fine_tuning_memory.experts_at_a_time", return_value=2):
        assert expect(layout=layout()).loading == full.loading * 2 / EXPERTS
    packed = expect(layout=layout(quantize="4bit", dtype=torch.bfloat16))
    plain = expect(layout=layout(dtype=torch.bfloat16))
    assert plain.weights - packed.weights == experts / 2 - (1 / 2 + 4 / 64) * experts / 4
    assert packed.loading == plain.loading
    in_file, on_host = (expect(layout=layout(offload=place)) for place in ("file", "host"))
    assert full.weights - in_file.weights == on_host.host == experts
    assert on_host.weights - in_file.weights == 2 * experts / len(layers)
    assert in_file.host == 0
    assert expect(layout=layout(spare_slots=1)).weights > full.weights


@pytest.mark.parametrize("lora_rank", [0, 2])
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "gpt_oss"])  # dense first layer; alternating layer types
def test_memory_by_block_is_within_a_tenth_of_the_exact_run(family, lora_rank):
    deep = config(family)
    kinds = {"layer_types": ["sliding_attention", "full_attention"] * 3} if family == "gpt_oss" else {}
    deep.update({"num_hidden_layers": 6, "hidden_size": 128} | kinds)
    adapt = partial(add_adapters, options=AdapterOptions(lora_rank=lora_rank))
    blocks = block_memory(deep, layout(context=64), adapt)
    for ep_size, recomputes in product((1, 4), (False, True)):
        asked = layout(context=64, ep_size=ep_size, gradient_checkpointing=recomputes)
        found = fine_tuning_memory(deep, asked, adapt, blocks=blocks)
        exact = exact_memory(deep, asked, adapt)
        assert found.weights == exact.weights
        assert found.total == pytest.approx(exact.total, rel=0.1)


def test_expert_bytes_fall_with_the_world():
    adapt = partial(add_adapters, options=AdapterOptions(lora_rank=0))
    model = causal_lm(config("qwen3_moe"))
    whole = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    trained = sum(parameter.nbytes for parameter in model.parameters())
    expect = partial(fine_tuning_memory, config("qwen3_moe"), adapt=adapt)
    for ep_size, shards in ((1, 4), (2, 2), (4, 1), (2, 4), (8, 8)):
        found = expect(layout=layout(ep_size=ep_size, shards=shards))
        assert found.weights == pytest.approx(whole / ep_size / shards, rel=0.02)
        assert found.gradients == pytest.approx(trained / ep_size / shards, rel=0.02)
        assert found.optimizer == pytest.approx(2 * trained / ep_size / shards, rel=0.02)
    assert expect(layout=layout(ep_size=2, shards=2)).gathered > expect(layout=layout(ep_size=4, shards=2)).gathered > 0
    assert expect(layout=layout(ep_size=4)).gathered == 0


def wide() -> Any:
    """Return the configuration of four layers, in which expert weights take most of the memory."""
    found = config("qwen3_moe")
    found.update({"num_hidden_layers": 4, "hidden_size": 128, "moe_intermediate_size": 96})
    return found


def measured_with_fsdp2(asked: Layout) -> list[int]:
    """Return weights, optimizer state, gradients, and the most that a step allocates, on this rank."""
    accelerator = make_accelerator("fsdp2", cpu=True)
    torch.manual_seed(accelerator.process_index)
    experts = ExpertParallel(accelerator, ep_size=asked.ep_size)
    plain: Any = causal_lm(wide(), dtype=asked.dtype, experts_implementation=use_toolkit_kernel()).train()
    if asked.gradient_checkpointing:
        recompute_blocks(plain)
    model, optimizer = experts.prepare(plain, adamw(plain))
    tokens = torch.randint(3, 60, (asked.sequences, asked.context + 1))
    for _ in range(2):
        optimizer.zero_grad()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            accelerator.backward(LanguageModeling().loss(model, {"tokens": tokens.clone()}).total)
        optimizer.step()
    parameters = list(model.parameters())
    states = [value for each in optimizer.optimizer.state.values() for value in each.values()]
    kept = (*parameters, *model.buffers()), states, [p.grad for p in parameters]
    return [*(sum(local_rows(tensor).nbytes for tensor in each) for each in kept), peak_bytes(profiler)]


@pytest.mark.parametrize(("ep_size", "shards"), [(2, 2), (2, 4), (4, 2)])
def test_expected_memory_with_fsdp2_is_within_a_tenth(ep_size: int, shards: int):
    for recomputes in (False, True):
        asked = layout(ep_size=ep_size, shards=shards, context=64, gradient_checkpointing=recomputes)
        expected = fine_tuning_memory(wide(), asked, lambda model: model, adamw)
        found = np.mean(run_distributed(measured_with_fsdp2, ep_size * shards, asked), axis=0)
        parts = [expected.weights, expected.optimizer, expected.gradients, expected.step]
        assert parts == pytest.approx(found, rel=0.1)


def test_shared_weights_count_once():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
        model[1].weight = model[0].weight

    class Sum:
        def loss(self, model: nn.Module, batch: Any) -> Any:
            return type("Loss", (), {"total": model(batch["x"]).sum()})

    task: Any = Sum()
    found = expected_memory(model, task, {"x": torch.empty(4, 8)}, lambda m: torch.optim.SGD(m.parameters(), lr=1.0))
    assert (found.weights, found.optimizer) == (8 * 8 * 4, 0)
    assert found.total == found.weights + found.step
