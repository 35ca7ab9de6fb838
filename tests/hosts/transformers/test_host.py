"""transformers' Trainer with our experts implementation equals its own, wherever experts are put."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.helpers import run_distributed
from tests.hosts.transformers.families import EXPERTS, FAMILIES, awaken, config, tokens
from toolkit.errors import UserError
from toolkit.hosts.transformers import (
    PlacedExperts,
    causal_lm,
    place_experts,
    placed_experts,
    replan_callback,
    use_toolkit_ep,
)
from toolkit.placement.placement import ExpertPlacement

STEPS, SAMPLES = 4, 8
ORDER = (5, 0, 7, 2, 6, 1, 4, 3)

CASES = [(2, 2, family, "permuted") for family in FAMILIES]
CASES += [(2, 2, "qwen3_moe", "replanned"), (2, 2, "qwen3_moe", "recomputed"), (4, 4, "gpt_oss", "replanned")]
CASES += [(4, 2, "qwen3_moe", "permuted"), (4, 2, "qwen3_moe", "replanned")]
"""(processes, ep_size, family, placement): with ep_size 2 on 4 processes FSDP cuts each rank's experts in two."""


def reverse(load_E: Any, current: ExpertPlacement) -> ExpertPlacement:  # noqa: ARG001
    """A planner that keeps every expert travelling."""
    return ExpertPlacement(tuple(row[::-1] for row in current.slots[::-1]))


def train(folder: Path, world: int, ep_size: int, family: str, placement: str) -> dict[str, Any]:
    from torch.utils.data import Dataset
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments
    from transformers.distributed import DistributedConfig

    implementation = "all_to_all" if placement == "stock" else "toolkit"
    distributed = DistributedConfig(fsdp_size=world, ep_size=ep_size, ep_implementation=implementation)
    model = causal_lm(
        folder / family,
        dtype=torch.float64,
        distributed_config=distributed,
        experts_implementation="batched_mm",  # grouped products know no float64
    )
    replan = replan_callback(reverse, every=1)
    refused = []
    if placement == "permuted":
        uneven = ExpertPlacement((ORDER[:5], ORDER[5:]))
        for wrong in (uneven, {"model.layers.7.mlp.experts": uneven}):
            try:
                place_experts(model, wrong)
            except UserError as error:
                refused.append(str(error))
    if placement in ("permuted", "recomputed"):
        place_experts(model, ExpertPlacement.from_slot_of_expert(ORDER, ep_size))

    class Samples(Dataset):
        def __len__(self) -> int:
            return STEPS * SAMPLES

        def __getitem__(self, index: int) -> dict[str, Tensor]:
            ids = tokens(index // SAMPLES, SAMPLES)[index % SAMPLES]
            return {"input_ids": ids, "labels": ids}

    class Trace(TrainerCallback):
        def __init__(self) -> None:
            self.lines: list[tuple[float, float]] = []

        def on_log(self, *_: Any, logs: Any, **__: Any) -> None:
            if "loss" in logs:
                self.lines.append((logs["loss"], float(logs["grad_norm"])))

    trace = Trace()
    arguments = TrainingArguments(
        output_dir=str(folder / "out"),
        use_cpu=True,
        max_steps=STEPS,
        per_device_train_batch_size=SAMPLES // world,
        learning_rate=1e-2,
        max_grad_norm=0.3,
        gradient_checkpointing=placement == "recomputed",
        lr_scheduler_type="constant",
        logging_steps=1,
        logging_nan_inf_filter=False,
        train_sampling_strategy="sequential",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=0,
    )
    callbacks = [trace, replan] if placement == "replanned" else [trace]
    trainer = Trainer(model, arguments, train_dataset=Samples(), callbacks=callbacks)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    saved = folder / f"{family}-{world}-{ep_size}-{placement}"
    trainer.save_model(str(saved))
    dist.barrier()
    return {
        "lines": trace.lines,
        "weights": dict(causal_lm(saved, dtype=torch.float64).state_dict()) if dist.get_rank() == 0 else {},
        "moved": [report.cost.experts for report in replan.reports],
        "held": [placed.placement.slots for placed in placed_experts(model).values()],
        "refused": refused,
        "load": [placed.load_E.tolist() for placed in placed_experts(model).values()],
    }


def train_all(folder: Path, cases: list[tuple[int, int, str, str]]) -> list[dict[str, Any]]:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    use_toolkit_ep()
    return [train(folder, *case) for case in cases]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, list[dict[str, Any]]]:
    """What each rank recorded, by case; each case has a stock run beside it."""
    folder, found = tmp_path_factory.mktemp("host"), {}
    for family in FAMILIES:
        torch.manual_seed(0)
        awaken(causal_lm(config(family), dtype=torch.float64)).save_pretrained(folder / family)
    for world in (2, 4):
        wanted = [case for case in CASES if case[0] == world]
        wanted += dict.fromkeys((w, ep_size, family, "stock") for w, ep_size, family, _ in wanted)
        for case, *ranks in zip(wanted, *run_distributed(train_all, world, folder, wanted, timeout_s=300), strict=True):
            found[case] = ranks
    return found


def difference(a: Any, b: Any) -> float:
    a, b = torch.as_tensor(a, dtype=torch.float64), torch.as_tensor(b, dtype=torch.float64)
    return float((a - b).norm() / b.norm().clamp(min=1e-30))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_trainer_with_experts_anywhere_equals_stock_expert_parallelism(runs: Any, case: tuple[int, int, str, str]):
    stock, ours = runs[(*case[:3], "stock")], runs[case]
    assert len(stock[0]["lines"]) == STEPS
    for theirs, mine in zip(stock, ours, strict=True):
        assert difference(mine["lines"], theirs["lines"]) < 1e-6
    saved, expected = ours[0]["weights"], stock[0]["weights"]
    assert saved.keys() == expected.keys()
    assert max(difference(saved[name], value) for name, value in expected.items()) < 1e-6


@pytest.mark.parametrize("case", CASES, ids=str)
def test_experts_really_were_elsewhere(runs: Any, case: tuple[int, int, str, str]):
    _, ep_size, _, placement = case
    (first, *_) = runs[case]
    if placement != "replanned":
        assert first["held"] == [ExpertPlacement.from_slot_of_expert(ORDER, ep_size).slots] * len(first["held"])
    else:
        assert first["moved"] == [EXPERTS] * len(first["moved"])
        assert len(first["moved"]) == STEPS * len(first["held"])


def test_placements_that_do_not_fit_are_refused_on_every_rank(runs: Any):
    for rank in runs[(2, 2, "gpt_oss", "permuted")]:
        slots, layer = rank["refused"]
        assert "[5, 3] slots per rank" in slots
        assert "no experts at 'model.layers.7.mlp.experts'" in layer


def test_models_that_came_another_way_are_refused():
    with pytest.raises(UserError, match="no experts under ep_implementation='toolkit'"):
        place_experts(causal_lm(config("mixtral")), ExpertPlacement((ORDER,)))


def test_ranks_that_share_a_batch_are_refused():
    with pytest.raises(UserError, match="tp_size=2"):
        PlacedExperts(nn.Identity(), SimpleNamespace(), SimpleNamespace(size=lambda: 2))


def test_an_interval_of_no_steps_is_refused():
    with pytest.raises(UserError, match="every=0"):
        replan_callback("swap", every=0)


def test_a_transformers_without_a_registry_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "transformers.distributed.expert_parallel", None)
    with pytest.raises(UserError, match=r"use 5\.23 or newer"):
        use_toolkit_ep()


def test_loads_are_counted_by_expert(runs: Any):
    total = torch.tensor([rank["load"] for rank in runs[(2, 2, "qwen3_moe", "permuted")]]).sum(0)
    for other in ("replanned", "recomputed"):
        again = torch.tensor([rank["load"] for rank in runs[(2, 2, "qwen3_moe", other)]]).sum(0)
        assert torch.equal(total, again), other
    assert total.sum(1).tolist() == [STEPS * SAMPLES * 12 * 2] * 2
