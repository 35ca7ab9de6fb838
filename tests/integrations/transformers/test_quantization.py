"""Adapters of 4-bit experts train as on one process, and packed weights migrate and are saved exactly."""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from benchmarks.support.families import EXPERTS
from benchmarks.support.processes import run_distributed
from tests.integrations.peft.models import add_adapters, together
from tests.integrations.transformers.test_lazy_loading import MOVED, PLACED, save_model
from tests.integrations.transformers.training import adamw, prepare, train_step
from toolkit.errors import UserError
from toolkit.experts.parallel.groups import ExpertGroups, make_expert_groups
from toolkit.experts.parallel.ownership import ownership_of
from toolkit.experts.sharding.find import experts_modules
from toolkit.experts.sharding.shard import shard_experts
from toolkit.integrations.peft.merged_weights import save_merged
from toolkit.integrations.transformers import (
    causal_lm,
    experts_in_files,
    kernel,
    place_experts,
    save_pretrained,
    use_toolkit_kernel,
)
from toolkit.integrations.transformers.quantization import BLOCK, SCALES, PackedRows, pack_rows, unpacked

TABLES = ("gate_up_proj", "down_proj")


def load_4bit(folder: Path, **options: Any) -> Any:
    with experts_in_files(quantize="4bit"):
        return causal_lm(folder, **{"experts_implementation": use_toolkit_kernel()} | options)


def rounded(value: Tensor) -> Tensor:
    """Return `value` after quantization by bitsandbytes."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    return dequantize_4bit(*quantize_4bit(value.view(-1, BLOCK), blocksize=BLOCK, quant_type="nf4")).view_as(value)


def load_rounded(folder: Path) -> Any:
    """Return a model without quantization, whose experts have the values of 4-bit experts."""
    model = causal_lm(folder)
    for module in experts_modules(model).values():
        for name in TABLES:
            module.get_parameter(name).data = rounded(module.get_parameter(name).data)
    return model


def train_4bit(folder: Path, checkpoint: Path) -> dict[str, Any]:
    """Return losses, and packed rows before and after training with migrations and after loading a checkpoint."""
    model = add_adapters(load_4bit(folder), r=2)
    experts, wrapped, optimizer = prepare(model, ep_size=2, placement=lambda *_: PLACED)
    before, losses = packed_rows(model), []
    for step in range(4):
        losses.append(train_step(experts.accelerator, wrapped, optimizer, step, samples=4, clip=0.5))
        place_experts(model, (MOVED, PLACED)[step % 2], optimizer)
    after = packed_rows(model)
    experts.save(checkpoint / "0")
    place_experts(model, MOVED, optimizer)
    experts.load(checkpoint / "0")
    return {"losses": losses, "before": before, "after": after, "loaded": packed_rows(model)}


def packed_rows(model: nn.Module) -> dict[str, Tensor]:
    """Return the frozen rows of this rank by name and expert."""
    return {
        f"{name} {expert}": row.clone()
        for name, parameter in model.named_parameters()
        if (ownership := ownership_of(parameter)) is not None and not parameter.requires_grad
        for expert, row in zip(ownership.row_ids, parameter.detach(), strict=True)
    }


def train_rounded(folder: Path) -> list[float]:
    model = add_adapters(load_rounded(folder), r=2)
    optimizer = adamw(model)
    return [train_step(Accelerator(cpu=True), model, optimizer, step, samples=4, clip=0.5) for step in range(4)]


def test_4bit_experts_on_two_processes_equal_one_and_keep_packed_rows(tmp_path: Path):
    folder = save_model(tmp_path / "model")
    (expected,) = run_distributed(train_rounded, 1, folder)
    ranks = run_distributed(train_4bit, 2, folder, tmp_path / "checkpoint")
    rows = together([rank["before"] for rank in ranks])
    assert len(rows) == EXPERTS * 4 * len({key.split(" ")[0].rpartition(".")[0] for key in rows})
    assert {row.dtype for row in rows.values()} == {torch.uint8, torch.int32}
    assert all(rank["losses"] == pytest.approx(expected, rel=1e-6) for rank in ranks)
    for state in ("after", "loaded"):
        found = together([rank[state] for rank in ranks])
        assert found.keys() == rows.keys()
        assert all(torch.equal(row, rows[key]) for key, row in found.items())


def test_unpacked_experts_equal_bitsandbytes_in_30_percent_of_memory(tmp_path: Path):
    folder = save_model(tmp_path)
    full, model = causal_lm(folder, dtype=torch.bfloat16), load_4bit(folder, dtype=torch.bfloat16)
    shard_experts(model.requires_grad_(False), ExpertGroups())
    before = after = 0
    for packed, module in zip(experts_modules(model).values(), experts_modules(full).values(), strict=True):
        for name in TABLES:
            value = module.get_parameter(name).detach()
            assert torch.equal(unpacked(packed, name, value.device), rounded(value))
            before += value.nbytes
            after += packed.get_parameter(name).nbytes + packed.get_parameter(name + SCALES).nbytes
    assert after <= 0.3 * before


@pytest.mark.parametrize("is_transposed", [False, True])
def test_frozen_product_in_parts_equals_one_product(is_transposed: bool, monkeypatch: pytest.MonkeyPatch):
    module: Any = PackedRows()
    module.is_transposed = is_transposed
    for key, value in pack_rows(module, {"rows": torch.randn(3, 160, 64)}).items():
        module.register_parameter(key, nn.Parameter(value, requires_grad=False))
    x, results = torch.randn(9, 160 if is_transposed else 64, dtype=torch.float64, requires_grad=True), []
    for most in (kernel.MOST_UNPACKED, 1):
        monkeypatch.setattr(kernel, "MOST_UNPACKED", most)
        y = kernel.FrozenProduct.apply(x, torch.tensor([4, 0, 5]), module, "rows")
        results.append([y, *torch.autograd.grad(y.square().sum(), x)])
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


def save_plain_and_merged(folder: Path, out: Path, processes: int) -> None:
    plain, model = load_4bit(folder).requires_grad_(False), with_random_adapters(load_4bit(folder))
    for each in (plain, model):
        shard_experts(each, make_expert_groups(processes))
    save_pretrained(plain, out / "plain")
    save_merged(model, out / "merged")


def with_random_adapters(model: nn.Module) -> Any:
    model, draws = add_adapters(model, r=2), torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=draws) / 10
    return model


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # raised by PEFT
@pytest.mark.parametrize("processes", [1, 2])
def test_save_of_4bit_experts_writes_unpacked_weights(tmp_path: Path, processes: int):
    folder = save_model(tmp_path / "model")
    run_distributed(save_plain_and_merged, processes, folder, tmp_path, processes)
    plain, merged = (causal_lm(tmp_path / name).state_dict() for name in ("plain", "merged"))
    torch.testing.assert_close(plain, load_rounded(folder).state_dict(), rtol=0, atol=0)
    expected = with_random_adapters(load_rounded(folder)).merge_and_unload().state_dict()
    torch.testing.assert_close(merged, expected, rtol=1e-6, atol=1e-6)


def test_quantize_with_another_experts_implementation_raises(tmp_path: Path):
    with pytest.raises(UserError, match=r"quantize and offload need use_toolkit_kernel"):
        load_4bit(save_model(tmp_path), experts_implementation="grouped_mm")
