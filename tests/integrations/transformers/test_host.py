"""transformers' Trainer with our experts implementation equals its own, wherever experts are put."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.integrations.transformers.families import EXPERTS, FAMILIES, awaken, config, tokens
from tests.integrations.transformers.trainers import usage_by_hand, usage_of
from tests.support.helpers import run_distributed
from toolkit.errors import UserError
from toolkit.experts.layer.stack import expert_stacks
from toolkit.experts.moving.replan_options import ReplanOptions
from toolkit.experts.placement.placement import ExpertPlacement
from toolkit.integrations.transformers import (
    causal_lm,
    place_experts,
    replan_callback,
    use_toolkit_ep,
)
from toolkit.integrations.transformers.toolkit_ep import ToolkitEP

STEPS, SAMPLES = 4, 8
ORDER = (5, 0, 7, 2, 6, 1, 4, 3)

CASES = [(2, 2, family, "permuted") for family in FAMILIES]
CASES += [(2, 2, "qwen3_moe", "replanned"), (2, 2, "qwen3_moe", "recomputed"), (4, 4, "gpt_oss", "replanned")]
CASES += [(4, 2, "qwen3_moe", "replanned")]
"""(processes, ep_size, family, placement): with ep_size 2 on 4 processes FSDP cuts each rank's experts in two."""


def reverse(load_E: Any, current: ExpertPlacement) -> ExpertPlacement:  # noqa: ARG001
    """A planner that keeps every expert travelling."""
    return ExpertPlacement(tuple(row[::-1] for row in current.slots[::-1]))


def load(folder: Path, world: int, ep_size: int, family: str, implementation: str) -> Any:
    from transformers.distributed import DistributedConfig

    model = causal_lm(
        folder / family,
        dtype=torch.float64,
        distributed_config=DistributedConfig(fsdp_size=world, ep_size=ep_size, ep_implementation=implementation),
        experts_implementation="batched_mm",  # grouped products know no float64
    )
    # FSDP2 gathers one type at once, and transformers 5.24 has DeepSeek-V3's routers in float32.
    for router in (module for name, module in model.named_modules() if name.endswith(".gate")):
        router.double()
    return model


def fit(model: Any, world: int, callbacks: list[Any], *, resume: str | None = None, **arguments: Any) -> Any:
    """Trainer's `STEPS` steps; returns the trainer, and each step's loss and gradient norm."""
    from torch.utils.data import Dataset
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    class Samples(Dataset):
        def __len__(self) -> int:
            return STEPS * SAMPLES

        def __getitem__(self, index: int) -> dict[str, Tensor]:
            ids = tokens(index // SAMPLES, SAMPLES)[index % SAMPLES]
            return {"input_ids": ids, "labels": ids}

    lines: list[tuple[float, float]] = []

    class Trace(TrainerCallback):
        def __init__(self) -> None:
            self.usage: list[dict[str, float]] = []
            self.load_SLE: list[list[list[int]]] = []
            """Of this rank, since training began."""

        def on_log(self, *_: Any, logs: Any, model: Any, **__: Any) -> None:
            if "loss" in logs:
                lines.append((logs["loss"], float(logs["grad_norm"])))
                self.usage.append(usage_of(logs))
                self.load_SLE.append([stack.log.load_E.tolist() for stack in expert_stacks(model).values()])

    given: dict[str, Any] = {
        "use_cpu": True,
        "max_steps": STEPS,
        "per_device_train_batch_size": SAMPLES // world,
        "learning_rate": 1e-2,
        "max_grad_norm": 0.3,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "train_sampling_strategy": "sequential",
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "seed": 0,
    }
    settings = TrainingArguments(**(given | arguments))
    trainer = Trainer(model, settings, train_dataset=Samples(), callbacks=[*callbacks, trace := Trace()])
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=resume)
    trainer.trace = trace
    return trainer, lines


def train(folder: Path, world: int, ep_size: int, family: str, placement: str) -> dict[str, Any]:
    model = load(folder, world, ep_size, family, "all_to_all" if placement == "stock" else "toolkit")
    replan = replan_callback(ReplanOptions(planner=reverse, every=1, guarded=False))
    refused = []
    if placement == "permuted":
        uneven = ExpertPlacement((ORDER[:5], ORDER[5:]))
        for wrong in (uneven, {"model.layers.7.mlp.experts": uneven}):
            try:
                place_experts(model, wrong, None)
            except UserError as error:
                refused.append(str(error))
    if placement in ("permuted", "recomputed"):
        place_experts(model, ExpertPlacement.from_slot_of_expert(ORDER, ep_size), None)
    callbacks = [replan] if placement == "replanned" else []
    out, recomputed = str(folder / "out"), placement == "recomputed"
    trainer, lines = fit(model, world, callbacks, output_dir=out, gradient_checkpointing=recomputed)
    saved = folder / f"{family}-{world}-{ep_size}-{placement}"
    trainer.save_model(str(saved))
    dist.barrier()
    return {
        "lines": lines,
        "weights": dict(causal_lm(saved, dtype=torch.float64).state_dict()) if dist.get_rank() == 0 else {},
        "moved": [migration.report.cost.experts for migration in replan.replanner.migrations] if callbacks else [],
        "held": [stack.placement.slots for stack in expert_stacks(model).values()],
        "refused": refused,
        "load": [stack.log.load_E.tolist() for stack in expert_stacks(model).values()],
        "usage": trainer.trace.usage,
        "history": [usage_of(line) for line in trainer.state.log_history],
        "load_by_step": trainer.trace.load_SLE,
    }


def quiet() -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    use_toolkit_ep()


def train_all(folder: Path, cases: list[tuple[int, int, str, str]]) -> list[dict[str, Any]]:
    quiet()
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
    with pytest.raises(UserError, match="has no experts that can move"):
        place_experts(causal_lm(config("mixtral")), ExpertPlacement((ORDER,)), None)


def trained_under_ddp(folder: Path) -> str:
    try:
        fit(
            causal_lm(config("mixtral")),
            2,
            [replan_callback(ReplanOptions(planner="swap", every=2))],
            output_dir=str(folder),
        )
    except UserError as error:
        return str(error)
    return ""


def test_moving_experts_in_trainer_is_refused_where_ddp_has_them_on_every_rank(tmp_path: Path):
    first, second = run_distributed(trained_under_ddp, 2, tmp_path)
    assert first == second
    assert "found no experts in MixtralForCausalLM that it could move" in first
    assert "\n" not in first


def test_ranks_that_share_a_batch_are_refused():
    with pytest.raises(UserError, match="tp_size=2"):
        ToolkitEP(nn.Identity(), SimpleNamespace(), SimpleNamespace(size=lambda: 2))


def prepared(folder: Path) -> str:
    """What ExpertParallel says of a model that transformers has spread."""
    from accelerate import Accelerator

    from toolkit.integrations.accelerate.expert_parallel import ExpertParallel

    use_toolkit_ep()
    if dist.get_rank() == 0:
        awaken(causal_lm(config("qwen3_moe"), dtype=torch.float64)).save_pretrained(folder / "qwen3_moe")
    dist.barrier()
    model = load(folder, 2, 2, "qwen3_moe", "all_to_all")
    with pytest.raises(UserError) as refused:
        ExpertParallel(Accelerator(cpu=True)).prepare(model, torch.optim.AdamW(model.parameters()))
    return str(refused.value)


def test_experts_that_transformers_has_spread_are_not_spread_again(tmp_path: Path):
    first, second = run_distributed(prepared, 2, tmp_path)
    assert first == second
    assert "load the model without, because ExpertParallel spreads both" in first


def test_loads_are_counted_by_expert(runs: Any):
    total = torch.tensor([rank["load"] for rank in runs[(2, 2, "qwen3_moe", "permuted")]]).sum(0)
    for other in ("replanned", "recomputed"):
        again = torch.tensor([rank["load"] for rank in runs[(2, 2, "qwen3_moe", other)]]).sum(0)
        assert torch.equal(total, again), other
    assert total.sum(1).tolist() == [STEPS * SAMPLES * 12 * 2] * 2


@pytest.mark.parametrize("case", [case for case in CASES if case[3] == "replanned"], ids=str)
def test_logs_have_the_load_of_all_ranks_experts_in_five_numbers(runs: Any, case: tuple[int, int, str, str]):
    ranks = runs[case]
    summed_SLE = np.sum([rank["load_by_step"] for rank in ranks], 0)
    of_step_SLE = np.diff(summed_SLE, axis=0, prepend=0)
    for rank in ranks:
        *lines, last = rank["history"]
        assert rank["usage"] == lines, "what a tracker after the callback is given"
        assert last == {}
        for line, load_LE in zip(lines, of_step_SLE.tolist(), strict=True):
            assert line == pytest.approx(usage_by_hand(load_LE), rel=1e-12)


RESUMED = [(2, 2, reverse, False), (4, 2, reverse, False), (2, 2, "lpt", True)]
"""(processes, ep_size, planner, guarded)."""


def interrupted(folder: Path, world: int, ep_size: int, planner: Any, guarded: bool) -> list[dict[str, Any]]:
    """Four steps, then the last two of them again from the checkpoint of step 2 by a new model and Trainer."""
    ends, out = [], str(folder / f"out-{world}-{guarded}")
    for resume in (None, f"{out}/checkpoint-2"):
        model = load(folder, world, ep_size, "dropout", "toolkit")
        replan = replan_callback(ReplanOptions(planner=planner, every=1, guarded=guarded))
        saving = {"save_strategy": "steps", "save_steps": 2, "save_only_model": True, "output_dir": out}
        schedule = {"lr_scheduler_type": "linear", "warmup_steps": 1}
        _, lines = fit(model, world, [replan], resume=resume, **saving, **schedule)
        stacks = expert_stacks(model).values()
        ends.append(
            {
                "lines": lines[-2:],
                "weights": {name: p.detach().full_tensor() for name, p in model.named_parameters()},
                "held": [stack.placement.slots for stack in stacks],
                "steps": sorted({migration.step for migration in replan.replanner.migrations}),
                "windows": [guard.state_dict()["windows"] for guard in replan.replanner.guards.values()],
            }
        )
    return ends


def interrupted_all(folder: Path, cases: list[Any]) -> list[Any]:
    quiet()
    return [interrupted(folder, *case) for case in cases]


@pytest.mark.parametrize("world", [2, 4])
def test_a_resumed_trainer_has_its_experts_where_they_were_and_ends_with_the_same_bits(world: int, tmp_path: Path):
    torch.manual_seed(0)
    settings = config("qwen3_moe")
    settings.attention_dropout = 0.1
    awaken(causal_lm(settings, dtype=torch.float64)).save_pretrained(tmp_path / "dropout")
    cases = [case for case in RESUMED if case[0] == world]
    for case, *ranks in zip(
        cases, *run_distributed(interrupted_all, world, tmp_path, cases, timeout_s=300), strict=True
    ):
        for whole, again in ranks:
            assert len(again["lines"]) == 2
            assert again["lines"] == whole["lines"]
            assert again["held"] == whole["held"]
            assert again["weights"].keys() == whole["weights"].keys()
            for name, value in whole["weights"].items():
                assert torch.equal(again["weights"][name], value), name
            if case[3]:
                assert again["windows"] == whole["windows"]
                assert len(again["windows"][0]) == STEPS
            else:
                assert again["steps"] == [3, 4], "a migration on resume, or none afterwards"
