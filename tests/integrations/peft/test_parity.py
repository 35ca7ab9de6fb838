"""Adapters of sharded experts equal unmodified PEFT on one process over two AdamW steps, in float64 and bfloat16."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.support.accelerators import make_accelerator
from benchmarks.support.families import EXPERTS, model_of, tokens
from benchmarks.support.precision import in_float64, relative_difference
from benchmarks.support.processes import run_distributed
from tests.integrations.peft.models import adapted, add_adapters, rows, together
from tests.integrations.transformers.training import adamw, train_step
from tests.parity.layouts import place
from tests.support.equality import assert_equal_rows
from toolkit.experts.moving.replan_options import ReplanOptions
from toolkit.integrations.accelerate.expert_parallel import ExpertParallel
from toolkit.integrations.transformers import recompute_blocks, save_pretrained

STEPS, SAMPLES, TOLERANCE = 2, 8, 1e-6


class Case(NamedTuple):
    processes: int
    ep_size: int
    family: str
    placement: str = "contiguous"
    trains_base: bool = False
    dense: str = "ddp"
    kind: str = "plain"

    @property
    def reference(self) -> "Case":
        return Case(1, 0, self.family, trains_base=self.trains_base, kind=self.kind)


ADAPTERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora with two ranks": {
        "use_rslora": True,
        "rank_pattern": {"mlp.experts.down_proj": 5},
        "alpha_pattern": {"mlp.experts.down_proj": 7},
    },
    "one layer": {"target_parameters": ["layers.1.mlp.experts.down_proj"]},
    "head": {"target_modules": [], "modules_to_save": ["lm_head"]},
    "router": {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.gate.weight"]},
    "recomputed": {},
    "adagrad": {},
}
CASES = [Case(1, 1, "mixtral"), Case(1, 1, "gpt_oss")]
CASES += [Case(2, 2, family, "shuffled") for family in ("gpt_oss", "glm4_moe", "dots1")]
CASES += [Case(2, 2, family, "shuffled", dense="fsdp2") for family in ("qwen3_moe", "qwen2_moe")]
CASES += [Case(2, 2, "qwen3_moe", kind=kind) for kind in ADAPTERS if kind != "plain"]
CASES += [Case(2, 2, "qwen3_moe", "shuffled", trains_base=True), Case(2, 2, "gpt_oss", "replicas", trains_base=True)]
CASES += [Case(2, 2, "qwen3_moe", "moving", trains_base=True, dense="fsdp2"), Case(2, 1, "mixtral")]
CASES += [
    Case(4, 2, "mixtral"),
    Case(4, 2, "qwen3_moe", "shuffled", dense="fsdp2"),
    Case(4, 4, "deepseek_v3", "replicas"),
    Case(4, 4, "olmoe", "moving", dense="fsdp2"),
]
CASES += [Case(4, 4, "mixtral", "moving", trains_base=True), Case(4, 4, "nemotron_h", "replicas", trains_base=True)]


def train(case: Case) -> dict[str, Any]:
    """Train a case; `ep_size` 0 is unmodified PEFT under Accelerate."""
    model = adapted(case.family, **ADAPTERS[case.kind])
    if case.trains_base:
        model.requires_grad_(True)
    kind: Any = torch.optim.Adagrad if case.kind == "adagrad" else torch.optim.AdamW
    optimizer = kind([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    accelerator: Any = make_accelerator(case.dense, cpu=True)
    inner, moved = model, 0
    if case.kind == "recomputed" and case.ep_size:
        recompute_blocks(model)
    if case.ep_size:
        moving = {"replan": ReplanOptions(planner="lpt", every=1, guarded=False)} if case.placement == "moving" else {}
        experts = ExpertParallel(
            accelerator,
            ep_size=case.ep_size,
            placement=lambda *_: place("contiguous" if moving else case.placement, EXPERTS, case.ep_size),
            **moving,
        )
        model, optimizer = experts.prepare(model, optimizer)
    losses, norms, grads = [], [], []
    share = SAMPLES // case.processes
    for step in range(STEPS):
        ids = tokens(step, SAMPLES)[accelerator.process_index * share :][:share]
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        norm = float(experts.global_norm(model.parameters())) if case.ep_size else None
        grads.append(rows(inner, grads=True))
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.03)))
        assert norm is None or norms[-1] == pytest.approx(norm, rel=1e-12)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    if case.ep_size:
        moved = sum(migration.report.cost.experts for migration in experts.migrations)
    return {"losses": losses, "norms": norms, "grads": grads, "weights": rows(inner), "moved": moved}


def train_all(cases: list[Case]) -> list[dict[str, Any]]:
    from transformers.utils import logging

    logging.set_verbosity_error()
    with in_float64():
        return [train(case) for case in cases]


@pytest.fixture(scope="module")
def runs() -> dict[Case, list[dict[str, Any]]]:
    """Results of each rank by case, from one launch per world size."""
    found = {}
    everything = [*CASES, *dict.fromkeys(case.reference for case in CASES)]
    for world in (1, 2, 4):
        cases = [case for case in everything if case.processes == world]
        for case, *ranks in zip(cases, *run_distributed(train_all, world, cases, timeout_s=300), strict=True):
            found[case] = ranks
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, case)))
def test_adapters_equal_unmodified_peft_on_one_process(case: Case, runs: dict[Case, list[dict[str, Any]]]):
    ranks, (expected,) = runs[case], runs[case.reference]
    for rank in ranks:
        for numbers in ("losses", "norms"):
            found, reference = torch.tensor(rank[numbers]), torch.tensor(expected[numbers])
            assert relative_difference(found, reference) < TOLERANCE, numbers
    assert min(expected["norms"]) > 0.03
    for step in range(STEPS):
        assert_equal_rows(together([rank["grads"][step] for rank in ranks]), expected["grads"][step], TOLERANCE)
    assert_equal_rows(together([rank["weights"] for rank in ranks]), expected["weights"], TOLERANCE)
    if case.placement == "moving":
        assert ranks[0]["moved"] > 0


FAMILIES = ("mixtral", "gpt_oss")


def train_in(folder: Path, family: str, dtype: torch.dtype, dense: str | None) -> dict[str, Any]:
    """Return losses, adapter gradients of the first step, and parameter types. `dense` None does not shard experts."""
    base = model_of(family).to(torch.bfloat16).to(dtype)  # both dtypes have the same values
    model = inner = add_adapters(base, r=8, lora_alpha=16, init_lora_weights=False)
    precision = "bf16" if dense == "fsdp2" else "no"
    accelerator: Any = make_accelerator(dense or "ddp", cpu=True, mixed_precision=precision)
    optimizer, grads = adamw(model, 1e-3), []
    if dense:
        model, optimizer = ExpertParallel(accelerator, ep_size=2).prepare(model, optimizer)
    hooked = getattr(optimizer, "optimizer", optimizer)
    hooked.register_step_pre_hook(lambda *_: grads.append(rows(inner, grads=True)))
    losses = [train_step(accelerator, model, optimizer, step) for step in range(STEPS)]
    if dense:
        save_pretrained(model, folder / family)
    dtypes: dict[bool, set[torch.dtype]] = {False: set(), True: set()}
    for name, parameter in inner.named_parameters():
        dtypes["lora" in name].add(parameter.dtype)
    expert_grads = {name: grad for name, grad in grads[0].items() if "experts" in name}
    return {"losses": losses, "grads": expert_grads, "base": dtypes[False], "adapters": dtypes[True]}


def train_families(folder: Path, dtypes: list[torch.dtype], dense: str | None) -> list[list[dict[str, Any]]]:
    return [[train_in(folder, family, dtype, dense) for dtype in dtypes] for family in FAMILIES]


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the relative distance over all tensors."""
    assert found.keys() == expected.keys()
    squares = sum(float((found[name] - value).float().square().sum()) for name, value in expected.items())
    return (squares / sum(float(value.float().square().sum()) for value in expected.values())) ** 0.5


@pytest.mark.parametrize(("world", "dense"), [(2, "ddp"), (4, "fsdp2")])
def test_sharded_bfloat16_base_equals_one_process_within_rounding(world: int, dense: str, tmp_path: Path):
    (singles,) = run_distributed(train_families, 1, tmp_path, [torch.bfloat16, torch.float32], None)
    sharded = run_distributed(train_families, world, tmp_path, [torch.bfloat16], dense)
    for family, (single, in_float32), *ranks in zip(FAMILIES, singles, *sharded, strict=True):
        rounding = distance(single["grads"], in_float32["grads"])
        assert 0 < rounding < 0.2
        grads = together([rank["grads"] for (rank,) in ranks])
        assert distance(grads, single["grads"]) < 2 * rounding
        assert distance(grads, in_float32["grads"]) < 2 * rounding
        for (rank,) in ranks:
            for loss, expected in zip(rank["losses"], single["losses"], strict=True):
                assert abs(loss / expected - 1) < 1e-2
            assert rank["base"] == {torch.bfloat16}
            assert rank["adapters"] == {torch.float32}
            assert all(row.dtype == torch.float32 for row in rank["grads"].values())
        saved = load_file(tmp_path / family / "adapter_model.safetensors")
        assert {value.dtype for value in saved.values()} == {torch.float32}
