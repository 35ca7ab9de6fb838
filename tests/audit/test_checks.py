"""Planted faults of checkpoints are reported."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.audit.models import CONFIGS, EXPERTS, WIDTH, State, build, copy_experts, experts_of, write
from toolkit.audit.checks import Audit, audit

Plant = Callable[[State], object]
families = pytest.mark.parametrize("family", CONFIGS)


def messages(found: Audit) -> str:
    return "\n".join(f"{each.check}: {each.message}" for each in found.findings)


def keep_half(state: State) -> None:
    """Keep the experts of one of two ranks, renumbered from 0, as KempnerForge#202, UniRL#158 and twinkle#116 saved."""
    for name in list(state):
        if ".experts." in name and name.split(".experts.")[1][0].isdigit():
            if int(name.split(".experts.")[1].split(".")[0]) >= EXPERTS // 2:
                del state[name]
        elif ("expert" in name or "_linear" in name) and "layers" in name:
            state[name] = state[name][: EXPERTS // 2]


def tile(state: State) -> None:
    """Write the shard of one rank twice, as after each rank loaded the same one in DeepSpeed#6589 and UniRL#158."""
    for layer in range(2):
        copy_experts(state, layer, {expert + EXPERTS // 2: expert for expert in range(EXPERTS // 2)})


def change(expert: int, do: Callable[[torch.Tensor], object]) -> Plant:
    return lambda state: do(next(iter(experts_of(state, 1).values()))(expert))


def repeat_layer(state: State) -> None:
    for name, matrix in experts_of(state, 1).items():
        for expert in range(EXPERTS):
            matrix(expert).copy_(experts_of(state, 0)[name.replace("layers.1", "layers.0")](expert))


def cut_router(state: State) -> None:
    for name in list(state):
        if name.endswith((".gate.weight", "router.weight", "router.layer.weight")):
            state[name] = state[name][: EXPERTS // 2]


FAULTS: dict[str, tuple[Plant, str]] = {
    "one rank's experts": (keep_half, "of 4 of 8 experts is missing: expert(s) 4-7"),
    "tiled": (tile, "expert(s) 4-7 repeats expert(s) 0-3 of the same layer"),
    "layer": (repeat_layer, "expert(s) 0-7 repeats expert(s) 0-7 of model.layers.0"),
    "expert": (lambda state: copy_experts(state, 1, {5: 2}), "expert(s) 5 repeats expert(s) 2 of the same layer"),
    "zeros": (change(3, lambda value: value.zero_()), "is zero in expert(s) 3"),
    "nan": (change(6, lambda value: value.view(-1)[3:4].fill_(float("nan"))), "has NaN in expert(s) 6"),
    "infinity": (change(1, lambda value: value.view(-1)[:1].fill_(float("inf"))), "has infinity in expert(s) 1"),
    "router": (cut_router, "has shape (4, 12) for 8 experts"),
    "zero rows": (
        change(2, lambda value: value[: len(value) // 2].zero_()),
        "half or more of its rows zero in expert(s) 2",
    ),
}


@families
@pytest.mark.parametrize(("plant", "message"), FAULTS.values(), ids=FAULTS)
def test_audit_of_planted_fault_reports_experts(tmp_path: Path, family: str, plant: Plant, message: str):
    state = build(family)
    plant(state)
    assert message in messages(audit(write(tmp_path, family, state)))


def test_audit_of_untied_weights_that_config_ties_reports_them(tmp_path: Path):
    state = build("granitemoe")
    state["lm_head.weight"] += 1
    found = audit(write(tmp_path, "granitemoe", state))
    assert "lm_head.weight differs from model.embed_tokens.weight" in messages(found)


def test_audit_of_mixed_types_reports_tensor(tmp_path: Path):
    state = build("mixtral")
    name = "model.layers.1.block_sparse_moe.experts.2.w1.weight"
    state[name] = state[name].half()
    (finding,) = audit(write(tmp_path, "mixtral", state)).findings
    assert finding.tensors == [name]
    assert "has several types, F32, F16: expert(s) 2" in finding.message


def test_audit_of_more_experts_than_configured_reports_them(tmp_path: Path):
    write(tmp_path, "qwen3_moe", build("qwen3_moe"), num_experts=6)
    assert "down_proj.weight of experts beyond 6: expert(s) 6-7" in messages(audit(tmp_path))


@families
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_audit_against_base_reports_order_of_experts(tmp_path: Path, family: str, noise: float):
    base, state = build(family), copy_experts(build(family), 1, {1: 4, 4: 1})
    draw = torch.Generator().manual_seed(1)
    state = {name: value + noise * torch.randn(value.shape, generator=draw) for name, value in state.items()}
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    write(tmp_path / "base", family, base)
    found = audit(write(tmp_path / "model", family, state), tmp_path / "base")
    assert "order: model.layers.1" in messages(found)
    assert "1 is 4, 4 is 1" in messages(found)
    assert len(found.findings) == 1


@families
def test_audit_against_base_reports_swapped_gate_and_up(tmp_path: Path, family: str):
    base, state = build(family), build(family)
    names = list(experts_of(state, 0))
    for expert in (0, 3):
        if len(names) == 3 and family != "gpt_oss":
            gate, up = (experts_of(state, 0)[name](expert) for name in names[:2])
            first = gate.clone()
            gate.copy_(up)
            up.copy_(first)
        else:
            fused = experts_of(state, 0)[names[0]](expert)
            fused.copy_(fused.roll(WIDTH, 1 if family == "gpt_oss" else 0))
    write(tmp_path / "base", family, base)
    found = audit(write(tmp_path / "model", family, state), tmp_path / "base")
    assert messages(found).startswith("halves: model.layers.0")
    assert "gate and up are swapped in expert(s) 0, 3" in messages(found)


def matrices(state: State) -> list[str]:
    return [n for n in state if (".experts." in n or "_linear" in n) and state[n].ndim > 1 and not n.endswith("bias")]


def keep_rows(state: State) -> None:
    """Keep the rows of one rank of each expert's matrix, as Megatron-LM#1836 saved."""
    state |= {name: state[name][..., : state[name].shape[-2] // 2, :].clone() for name in matrices(state)}


def transpose(state: State) -> None:
    """Exchange inputs and outputs, as cosmos-rl#478 exported."""
    state |= {name: state[name].mT.contiguous() for name in matrices(state)}


def initialize(state: State) -> None:
    """Leave experts at their initialization, as Megatron-LM#5844 converted."""
    draw = torch.Generator().manual_seed(1)
    state |= {name: torch.randn(state[name].shape, generator=draw) for name in matrices(state) if "layers.1" in name}


@families
@pytest.mark.parametrize("plant", [keep_rows, transpose, initialize])
def test_audit_against_base_reports_other_shapes_and_values(tmp_path: Path, family: str, plant: Plant):
    base, state = build(family), build(family)
    plant(state)
    write(tmp_path / "base", family, base)
    found = audit(write(tmp_path / "model", family, state), tmp_path / "base")
    # A square matrix keeps its shape when it is transposed.
    assert ("order" if plant is initialize else "base") in {each.check for each in found.findings} <= {"base", "order"}


def test_audit_of_missing_file_and_entries_reports_them(tmp_path: Path):
    write(tmp_path, "mixtral", build("mixtral"))
    path = tmp_path / "model.safetensors.index.json"
    entries = json.loads(path.read_text())["weight_map"]
    del entries["model.norm.weight"]
    entries["model.other.weight"] = "model-00001-of-00003.safetensors"
    path.write_text(json.dumps({"weight_map": entries}))
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    found = messages(audit(tmp_path))
    assert "model.safetensors.index.json names model-00002-of-00003.safetensors, which is missing" in found
    assert "has model.other.weight in model-00001-of-00003.safetensors, which does not have it" in found


def write_distributed(folder: Path, state: dict[str, Any]) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about one process
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS["qwen3_moe"]))
    return folder


def test_audit_of_distributed_checkpoint_reports_missing_experts(tmp_path: Path):
    state = build("qwen3_moe")
    assert not audit(write_distributed(tmp_path / "healthy", dict(state))).findings
    keep_half(state)
    half = write_distributed(tmp_path / "half", dict(state))
    assert "of 4 of 8 experts is missing: expert(s) 4-7" in messages(audit(half))


@pytest.mark.parametrize(
    ("mean_of", "square_of", "message"),
    [
        (lambda mean: mean, lambda square: square, ""),
        (lambda mean: mean[:3], lambda square: square, ": exp_avg has shape"),
        (lambda mean: mean, lambda square: square.flip(0) * 1e-3, ": exp_avg and exp_avg_sq are not of"),
    ],
    ids=["none", "shape", "other expert"],
)
def test_audit_of_optimizer_moments_reports_mismatch(tmp_path: Path, mean_of: Any, square_of: Any, message: str):
    state = build("qwen3_moe")
    name = "model.layers.0.mlp.experts.0.gate_proj.weight"
    mean, square = mean_of(state[name] / 10), square_of((state[name] / 10).square())
    moments = {f"optim.state.{name}.exp_avg": mean, f"optim.state.{name}.exp_avg_sq": square}
    found = messages(audit(write_distributed(tmp_path, state | moments)))
    assert f"{name}{message}" in found if message else found == ""
