"""Adapters of sharded experts are saved for unmodified PEFT, and load into any layout."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel
from torch import Tensor, nn

from benchmarks.support.families import tokens
from benchmarks.support.precision import in_float64
from benchmarks.support.processes import run_distributed
from tests.integrations.accelerate.toy import error_of
from tests.integrations.peft.models import MATRICES, adapted, base, rows, together
from tests.integrations.transformers.training import prepare, train_step
from tests.parity.layouts import place
from toolkit.integrations.peft.merged_weights import save_merged
from toolkit.integrations.transformers import causal_lm, pretrained_files, save_pretrained

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # raised by PEFT


def layout(ep_size: int, placement: str) -> dict[str, Any]:
    return {"ep_size": ep_size, "placement": lambda _, count, ranks: place(placement, count, ranks)}


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() <= expected.keys()
    return max((found[name] - expected[name]).abs().max().item() for name in found)


def logit_difference(model: Any, other: Any, ids: Tensor) -> float:
    return float((model(input_ids=ids).logits - other(input_ids=ids).logits).abs().max())


def gather_rows(model: nn.Module) -> dict[str, Tensor]:
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, rows(model))
    return together(ranks)


def save_and_load(folder: Path, family: str, options: dict[str, Any]) -> None:
    """Train sharded adapters, save them, and load them into unmodified PEFT, merged, and into another layout."""
    with in_float64():
        model = adapted(family, **options)
        experts, wrapped, optimizer = prepare(model, **layout(2, "replicas"))
        for number in range(2):
            train_step(experts.accelerator, wrapped, optimizer, number, clip=0.03)
        save_pretrained(wrapped, folder / "adapters")
        dist.barrier()
        trained, ids = gather_rows(model), tokens(9, 4)
        unmodified = PeftModel.from_pretrained(base(family), folder / "adapters")
        assert difference(rows(unmodified), trained) == 0
        assert logit_difference(base(family), unmodified, ids) > 1e-3
        assert logit_difference(wrapped, unmodified, ids) < 1e-6
        if options:
            return
        with mock.patch.object(pretrained_files, "MOST_IN_A_FILE", "20KB"):  # one file per layer
            save_merged(wrapped, folder / "merged")
        dist.barrier()
        assert (folder / "merged" / "model.safetensors.index.json").exists()
        merged = causal_lm(folder / "merged", dtype=torch.float64, experts_implementation="eager")
        assert logit_difference(merged, unmodified, ids) < 1e-6
        assert logit_difference(wrapped, unmodified, ids) < 1e-6, "the adapters stay active"
        other = adapted(family, init_lora_weights=True)
        _, wrapped_other, _ = prepare(other, **layout(2, "shuffled"))
        other.load_adapter(folder / "adapters", "default", is_trainable=True)
        assert difference(gather_rows(other), trained) == 0
        assert logit_difference(wrapped_other, unmodified, ids) < 1e-6


TRAINED_EXPERTS = {"target_parameters": None, "modules_to_save": ["experts"]}


@pytest.mark.parametrize(
    ("family", "options"), [("mixtral", {}), ("gpt_oss", {}), ("nemotron_h", {}), ("qwen3_moe", TRAINED_EXPERTS)]
)
def test_saved_adapters_load_into_unmodified_peft_and_other_layout(family: str, options: Any, tmp_path: Path):
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters" / "README.md").write_text("Trained on tests")
    run_distributed(save_and_load, 2, tmp_path, family, options)
    card = (tmp_path / "adapters" / "README.md").read_text()
    assert "Trained on tests" in card
    assert "library_name: peft" in card


def resume(folder: Path, first: int, last: int, loads: bool) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses of steps `first` to `last` after an optional checkpoint, and the rows at their end."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    with in_float64():
        experts, model, optimizer = prepare(adapted("mixtral"), **layout(world, "shuffled"))
        if loads:
            experts.load(folder / f"step-{first}")
        losses = [train_step(experts.accelerator, model, optimizer, number, clip=0.03) for number in range(first, last)]
        experts.save(folder / f"step-{last}")
        return losses, rows(getattr(model, "module", model))


def test_adapters_resume_on_four_two_and_one_processes(tmp_path: Path):
    ((expected, weights),) = run_distributed(resume, 1, tmp_path / "full", 0, 6, False)
    parts = [
        run_distributed(resume, world, tmp_path / "parts", first, first + 2, first > 0)
        for world, first in ((4, 0), (2, 2), (1, 4))
    ]
    assert [loss for ((losses, _), *_) in parts for loss in losses] == pytest.approx(expected, rel=1e-6)
    ((_, found),) = parts[-1]
    assert difference(found, weights) < 1e-6


def losses_by_adapter(shards: bool) -> list[float]:
    """Return the losses with either of two adapters, with none, and with both."""
    with in_float64():
        ids, model = tokens(0, 4), adapted("qwen3_moe")
        torch.manual_seed(7)
        scaled = {"r": 2, "lora_alpha": 6}
        other = LoraConfig(**scaled, target_modules=["q_proj"], target_parameters=MATRICES, init_lora_weights=False)
        model.add_adapter("other", other)
        wrapped = prepare(model)[1] if shards else model

        def loss() -> float:
            return wrapped(input_ids=ids, labels=ids).loss.item()

        losses = [loss()]
        model.set_adapter("other")
        losses.append(loss())
        with model.disable_adapter():
            losses.append(loss())
        model.base_model.set_adapter(["default", "other"])
        return [*losses, loss()]


def test_active_and_disabled_adapters_equal_unmodified_peft():
    expected, found = (losses_by_adapter(shards) for shards in (False, True))
    assert len({round(loss, 6) for loss in expected}) == 4
    assert found == pytest.approx(expected, rel=1e-6)


def errors_of_adapters(folder: Path) -> dict[str, str]:
    """Return errors by expected message."""
    biases = adapted("gpt_oss", target_parameters=["mlp.experts.gate_up_proj_bias"])
    late, part = adapted("mixtral"), adapted("mixtral")
    prepare(late, ep_size=1)
    prepare(part, ep_size=2)
    config = LoraConfig(target_modules=["q_proj"], target_parameters=MATRICES)
    return {
        "are not supported": error_of(prepare, biases),
        "before prepare": error_of(late.add_adapter, "late", config),
        "the experts of this rank": error_of(part.get_base_model().save_pretrained, folder),
    }


def test_unsupported_adapters_raise(tmp_path: Path):
    for errors in run_distributed(errors_of_adapters, 2, tmp_path):
        for message, error in errors.items():
            assert message in error.lower()
            assert "\n" not in error


def test_base_with_merged_attention_adapters_saves_on_one_process(tmp_path: Path):
    with in_float64():
        model, ids = adapted("mixtral", target_parameters=None), tokens(9, 4)
        experts, *prepared = prepare(model, ep_size=1)
        train_step(experts.accelerator, *prepared, 0)
        logits = model(input_ids=ids).logits
        model.merge_and_unload().save_pretrained(tmp_path)
        merged: Any = causal_lm(tmp_path, dtype=torch.float64, experts_implementation="eager")
        assert (merged(input_ids=ids).logits - logits).abs().max() < 1e-6
