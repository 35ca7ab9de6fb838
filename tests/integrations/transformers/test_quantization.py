"""4-bit experts: adapters train as on one process with the same numbers, and rows migrate and are saved as bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.integrations.transformers.families import EXPERTS, tokens
from tests.integrations.transformers.test_lazy_loading import MOVED, PLACED, saved
from tests.support.helpers import run_distributed
from toolkit.errors import UserError
from toolkit.experts.parallel.groups import ExpertGroups, make_expert_groups
from toolkit.experts.parallel.ownership import ownership_of
from toolkit.experts.sharding.find import require_experts
from toolkit.experts.sharding.shard import shard_experts
from toolkit.integrations.accelerate.expert_parallel import ExpertParallel
from toolkit.integrations.peft.merged_weights import save_merged
from toolkit.integrations.transformers import (
    causal_lm,
    experts_in_files,
    place_experts,
    save_pretrained,
    use_toolkit_kernel,
)
from toolkit.integrations.transformers.quantization import BLOCK, SCALES, unpacked

TABLES = ("gate_up_proj", "down_proj")


def adapted(model: nn.Module) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    return get_peft_model(
        model,
        LoraConfig(r=2, target_modules=["q_proj"], target_parameters=[f"mlp.experts.{name}" for name in TABLES]),
    )


def packed(folder: Path, **options: Any) -> Any:
    with experts_in_files(quantize="4bit"):
        return causal_lm(folder, **{"experts_implementation": use_toolkit_kernel()} | options)


def quantised(value: Tensor) -> Tensor:
    """What is left of `value` by bitsandbytes alone."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    return dequantize_4bit(*quantize_4bit(value.view(-1, BLOCK), blocksize=BLOCK, quant_type="nf4")).view_as(value)


def train(model: Any, wrapped: Any, optimizer: Any, clip: Any, rank: int, samples: int, move: Any) -> list[float]:
    """Losses of four clipped steps on the global batch; `move` is called after each."""
    found = []
    for step in range(4):
        ids = tokens(step, 4)[samples * rank : samples * (rank + 1)]
        loss = wrapped(input_ids=ids, labels=ids).loss
        loss.backward()
        clip(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
        move(step)
    return found


def on_two(folder: Path, moves: bool, checkpoint: Path) -> dict[str, Any]:
    """Losses and bytes of a rank, before and after training and after a checkpoint is loaded in another layout."""
    from accelerate import Accelerator

    model = adapted(packed(folder))
    optimizer: Any = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    accelerator = Accelerator(cpu=True)
    experts = ExpertParallel(accelerator, ep_size=2, placement=lambda *_: PLACED)
    wrapped, optimizer = experts.prepare(model, optimizer)
    before = by_expert(model)

    def move(step: int) -> None:
        if moves:
            place_experts(model, (MOVED, PLACED)[step % 2], optimizer)

    found = train(model, wrapped, optimizer, accelerator.clip_grad_norm_, dist.get_rank(), 2, move)
    after = by_expert(model)
    experts.save(checkpoint / "0")
    place_experts(model, MOVED, optimizer)
    experts.load(checkpoint / "0")
    return {"losses": found, "before": before, "after": after, "loaded": by_expert(model)}


def by_expert(model: nn.Module) -> dict[str, Tensor]:
    """The bytes of frozen rows here, by name and expert."""
    return {
        f"{name} {expert}": row.clone()
        for name, parameter in model.named_parameters()
        if (ownership := ownership_of(parameter)) is not None and not parameter.requires_grad
        for expert, row in zip(ownership.row_ids, parameter.detach(), strict=True)
    }


def on_one(folder: Path) -> list[float]:
    """Losses of stock PEFT on one process, with the numbers that bitsandbytes leaves of the experts."""
    plain: Any = causal_lm(folder)
    for module in require_experts(plain).values():
        for name in TABLES:
            module.get_parameter(name).data = quantised(module.get_parameter(name).data)
    model = adapted(plain)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return train(model, model, optimizer, nn.utils.clip_grad_norm_, 0, 4, lambda _: None)


def test_quantized_experts_on_two_ranks_train_as_one_process_and_keep_every_byte(tmp_path: Path):
    folder = saved(tmp_path / "model")
    (expected,) = run_distributed(on_one, 1, folder)
    still, moved = (run_distributed(on_two, 2, folder, moves, tmp_path / str(moves)) for moves in (False, True))
    for ranks in (still, moved):
        losses = [sum(both) / 2 for both in zip(*(rank["losses"] for rank in ranks), strict=True)]
        assert losses == pytest.approx(expected, rel=1e-6)
    everywhere = {key: row for rank in still for key, row in rank["before"].items()}
    assert len(everywhere) == EXPERTS * 4 * len({key.split(" ")[0].rpartition(".")[0] for key in everywhere})
    assert {row.dtype for row in everywhere.values()} == {torch.uint8, torch.int32}
    for ranks in (still, moved):
        for state in ("after", "loaded"):
            found = {key: row for rank in ranks for key, row in rank[state].items()}
            assert found.keys() == everywhere.keys()
            assert all(torch.equal(row, everywhere[key]) for key, row in found.items())


def test_unpacked_experts_equal_bitsandbytes_and_take_less_than_a_third(tmp_path: Path):
    folder = saved(tmp_path)
    whole, model = causal_lm(folder, dtype=torch.bfloat16), packed(folder, dtype=torch.bfloat16).requires_grad_(False)
    shard_experts(model, ExpertGroups())
    before = after = 0
    for mine, module in zip(require_experts(model).values(), require_experts(whole).values(), strict=True):
        for name in TABLES:
            value = module.get_parameter(name).detach()
            assert torch.equal(unpacked(mine, name, value.device), quantised(value))
            before += value.nbytes
            after += mine.get_parameter(name).nbytes + mine.get_parameter(name + SCALES).nbytes
    assert after <= 0.3 * before


def save_both_ways(folder: Path, out: Path, processes: int) -> None:
    plain, model = packed(folder).requires_grad_(False), adapted(packed(folder))
    draw_adapters(model)
    for each in (plain, model):
        shard_experts(each, make_expert_groups(processes))
    save_pretrained(plain, out / "plain")
    save_merged(model, out / "merged")


def draw_adapters(model: nn.Module) -> None:
    draws = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=draws) / 10


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # by PEFT
@pytest.mark.parametrize("processes", [1, 2])
def test_save_quantized_experts_writes_unpacked_weights(tmp_path: Path, processes: int):
    folder = saved(tmp_path / "model")
    expected: Any = causal_lm(folder)
    for module in require_experts(expected).values():
        for name in TABLES:
            module.get_parameter(name).data = quantised(module.get_parameter(name).data)
    run_distributed(save_both_ways, processes, folder, tmp_path, processes)
    assert_equal_weights(causal_lm(tmp_path / "plain"), expected, 0)
    merged = adapted(expected)
    draw_adapters(merged)
    assert_equal_weights(causal_lm(tmp_path / "merged"), merged.merge_and_unload(), 1e-6)


def assert_equal_weights(model: nn.Module, expected: nn.Module, tolerance: float) -> None:
    found = model.state_dict()
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance)


def test_quantize_for_another_experts_implementation_raises(tmp_path: Path):
    with pytest.raises(UserError, match=r"quantize and offload need use_toolkit_kernel"):
        packed(saved(tmp_path), experts_implementation="grouped_mm")
