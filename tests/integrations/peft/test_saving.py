"""Adapters leave as stock PEFT reads them, and come back under any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from tests.integrations.peft.models import adapted, base, rows
from tests.integrations.peft.test_parity import place
from tests.integrations.transformers.families import tokens
from tests.support.equality import in_float64
from tests.support.helpers import run_distributed
from toolkit.errors import UserError
from toolkit.integrations.accelerate.expert_parallel import ExpertParallel
from toolkit.integrations.peft.merged_weights import save_merged
from toolkit.integrations.transformers import causal_lm, pretrained_files, save_pretrained

FAMILIES = ("mixtral", "gpt_oss", "nemotron_h")


def prepared(model: Any, ep_size: int, placement: str) -> tuple[ExpertParallel, Any, Any]:
    from accelerate import Accelerator

    optimizer: Any = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    experts = ExpertParallel(Accelerator(cpu=True), ep_size=ep_size, placement=lambda *_: place(placement, ep_size))
    return experts, *experts.prepare(model, optimizer)


def step(experts: ExpertParallel, model: Any, optimizer: Any, number: int) -> float:
    accelerator = experts.accelerator
    share = 8 // accelerator.num_processes
    ids = tokens(number, 8)[accelerator.process_index * share :][:share]
    loss = model(input_ids=ids, labels=ids).loss
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 0.03)
    optimizer.step()
    optimizer.zero_grad()
    return float(accelerator.reduce(loss.detach(), "mean"))


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() <= expected.keys()
    return max((found[name] - expected[name]).abs().max().item() for name in found)


def gathered(model: nn.Module) -> dict[str, Tensor]:
    import torch.distributed as dist

    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, rows(model))
    return {name: row for each in everyones for name, row in each.items()}


def saved_and_loaded(folder: Path, family: str) -> dict[str, Any]:
    """Train spread adapters, save them, read them with stock PEFT, and load them into another layout."""
    import torch.distributed as dist
    from peft import PeftModel

    with in_float64():
        model = adapted(family)
        experts, wrapped, optimizer = prepared(model, 2, "copies")
        for number in range(2):
            step(experts, wrapped, optimizer, number)
        model.save_pretrained(folder / family)
        with mock.patch.object(pretrained_files, "MOST_IN_A_FILE", "20KB"):  # in several files, by layer
            save_merged(wrapped, folder / f"{family} merged")
        dist.barrier()
        trained, ids = gathered(model), tokens(9, 4)
        stock = PeftModel.from_pretrained(base(family), folder / family)
        logits = stock(input_ids=ids).logits
        assert (folder / f"{family} merged" / "model.safetensors.index.json").exists()
        merged: Any = causal_lm(folder / f"{family} merged", dtype=torch.float64, experts_implementation="eager")
        other = adapted(family, init_lora_weights=True)
        _, wrapped_other, _ = prepared(other, 2, "shuffled")
        other.load_adapter(folder / family, "default", is_trainable=True)
        return {
            "stock": difference(rows(stock), trained),
            "ours": difference(gathered(other), trained),
            "merged": (merged(input_ids=ids).logits - logits).abs().max().item(),
            "still unmerged": (wrapped(input_ids=ids).logits - logits).abs().max().item(),
            "changed": (base(family)(input_ids=ids).logits - logits).abs().max().item(),
            "logits of ours": (wrapped_other(input_ids=ids).logits - logits).abs().max().item(),
        }


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_saved_is_what_stock_peft_loads_and_the_way_back(family: str, tmp_path: Path):
    for found in run_distributed(saved_and_loaded, 2, tmp_path, family):
        assert (found["stock"], found["ours"]) == (0, 0)
        assert found["changed"] > 1e-3
        assert max(found[name] for name in ("merged", "still unmerged", "logits of ours")) < 1e-6


def trained_experts(folder: Path) -> dict[str, Any]:
    """Experts that PEFT has copied to train them whole, saved and read by stock PEFT."""
    import torch.distributed as dist
    from peft import PeftModel

    with in_float64():
        model = adapted("qwen3_moe", target_parameters=None, modules_to_save=["experts"])
        experts, wrapped, optimizer = prepared(model, 2, "copies")
        for number in range(2):
            step(experts, wrapped, optimizer, number)
        save_pretrained(wrapped, folder)
        dist.barrier()
        stock, ids = PeftModel.from_pretrained(base("qwen3_moe"), folder), tokens(9, 4)
        logits = wrapped(input_ids=ids).logits
        return {
            "rows": difference(rows(stock), gathered(model)),
            "logits": (stock(input_ids=ids).logits - logits).abs().max().item(),
            "changed": (base("qwen3_moe")(input_ids=ids).logits - logits).abs().max().item(),
        }


def test_experts_trained_whole_under_peft_are_saved_beside_what_a_card_said(tmp_path: Path):
    (tmp_path / "README.md").write_text("How they were trained")
    for found in run_distributed(trained_experts, 2, tmp_path):
        assert found["rows"] == 0
        assert found["changed"] > 1e-3
        assert found["logits"] < 1e-6
    card = (tmp_path / "README.md").read_text()
    assert "How they were trained" in card
    assert "library_name: peft" in card


def continued(folder: Path, first: int, last: int, loads: bool) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of steps `first` to `last`, from what another world saved, and the rows at their end."""
    import torch.distributed as dist

    world = dist.get_world_size() if dist.is_initialized() else 1
    with in_float64():
        experts, model, optimizer = prepared(adapted("mixtral"), world, "shuffled")
        if loads:
            experts.load(folder / f"step-{first}")
        losses = [step(experts, model, optimizer, number) for number in range(first, last)]
        experts.save(folder / f"step-{last}")
        return losses, rows(getattr(model, "module", model))


def test_four_processes_two_and_one_continue_each_other(tmp_path: Path):
    whole = run_distributed(continued, 1, tmp_path / "whole", 0, 6, False)
    parts = [
        run_distributed(continued, world, tmp_path / "parts", first, first + 2, first > 0)
        for world, first in ((4, 0), (2, 2), (1, 4))
    ]
    ((expected, weights),) = whole
    assert [loss for ((losses, _), *_) in parts for loss in losses] == pytest.approx(expected, rel=1e-6)
    ((_, found),) = parts[-1]
    assert difference(found, weights) < 1e-6


def served(forwards: list[int]) -> list[float]:
    """How far the logits of this rank's batches are from stock PEFT's, where the other rank has fewer."""
    import torch.distributed as dist

    with in_float64():
        stock, model = adapted("mixtral"), adapted("mixtral")
        experts, wrapped, _ = prepared(model, 2, "shuffled")
        differences = []
        with torch.no_grad(), experts.join():
            for number in range(forwards[dist.get_rank()]):
                ids = tokens(number, 2)
                differences.append(float((wrapped(input_ids=ids).logits - stock(input_ids=ids).logits).abs().max()))
        return differences


def test_ranks_that_are_done_serve_experts_with_their_adapters():
    several, none = run_distributed(served, 2, [2, 0])
    assert len(several) == 2
    assert none == []
    assert max(several) < 1e-6


def chosen_adapters() -> dict[str, float]:
    """Two adapters of which one is active, and none, against stock PEFT."""
    from peft import LoraConfig

    with in_float64():
        ids, losses = tokens(0, 4), {}
        for kind in ("stock", "ours"):
            model = adapted("qwen3_moe")
            settings = model.peft_config["default"]
            torch.manual_seed(7)
            other = LoraConfig(
                r=2,
                lora_alpha=6,  # another scaling than the first one's
                target_modules=settings.target_modules,
                target_parameters=list(settings.target_parameters),
                init_lora_weights=False,
            )
            model.add_adapter("other", other)
            wrapped = prepared(model, 1, "contiguous")[1] if kind == "ours" else model
            losses[f"default {kind}"] = float(wrapped(input_ids=ids, labels=ids).loss)
            model.set_adapter("other")
            losses[f"other {kind}"] = float(wrapped(input_ids=ids, labels=ids).loss)
            with model.disable_adapter():
                losses[f"none {kind}"] = float(wrapped(input_ids=ids, labels=ids).loss)
            model.base_model.set_adapter(["default", "other"])
            losses[f"both {kind}"] = float(wrapped(input_ids=ids, labels=ids).loss)
        return losses


def test_adapters_are_chosen_and_disabled_as_in_stock_peft():
    (losses,) = run_distributed(chosen_adapters, 1)
    stock = {name.removesuffix(" stock"): loss for name, loss in losses.items() if name.endswith("stock")}
    assert len({round(loss, 6) for loss in stock.values()}) == 4
    for name, loss in stock.items():
        assert losses[f"{name} ours"] == pytest.approx(loss, rel=1e-6)


def refusals(folder: Path) -> list[str]:
    from peft import LoraConfig

    said = []
    model = adapted("gpt_oss", target_parameters=["mlp.experts.gate_up_proj_bias"])
    with pytest.raises(UserError) as error:
        prepared(model, 1, "contiguous")
    said.append(str(error.value))
    model = adapted("mixtral")
    prepared(model, 1, "contiguous")
    more = LoraConfig(
        target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    )
    with pytest.raises(UserError) as error:
        model.add_adapter("late", more)
    said.append(str(error.value))
    model = adapted("mixtral")
    prepared(model, 2, "contiguous")
    with pytest.raises(UserError) as error:
        model.get_base_model().save_pretrained(folder)
    said.append(str(error.value))
    return said


def test_what_is_not_supported_is_refused_in_one_line_with_its_reason(tmp_path: Path):
    words = ["are not supported", "before prepare", "the experts of this rank"]
    for said in run_distributed(refusals, 2, tmp_path):
        for sentence, word in zip(said, words, strict=True):
            assert word.lower() in sentence.lower()
            assert "\n" not in sentence


def merged_on_one_process(folder: Path) -> float:
    with in_float64():
        model, ids = adapted("mixtral", target_parameters=None), tokens(9, 4)
        step(*prepared(model, 1, "contiguous"), 0)
        logits = model(input_ids=ids).logits
        model.merge_and_unload().save_pretrained(folder)
        merged: Any = causal_lm(folder, dtype=torch.float64, experts_implementation="eager")
        return float((merged(input_ids=ids).logits - logits).abs().max())


def test_on_one_process_a_base_with_merged_adapters_of_attention_is_saved_by_its_own_method(tmp_path: Path):
    (difference,) = run_distributed(merged_on_one_process, 1, tmp_path)
    assert difference < 1e-6
