"""Planted faults are found and named; healthy checkpoints have no finding."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.audit.models import CONFIGS, EXPERTS, WIDTH, State, build, experts_of, write
from toolkit.audit.checks import Audit, audit

FAMILIES = list(CONFIGS)
Plant = Callable[[State], None]


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
        for matrix in experts_of(state, layer).values():
            for expert in range(EXPERTS // 2):
                matrix(expert + EXPERTS // 2).copy_(matrix(expert))


def change(expert: int, do: Callable[[torch.Tensor], object]) -> Plant:
    def plant(state: State) -> None:
        matrix = next(iter(experts_of(state, 1).values()))
        do(matrix(expert))

    return plant


def repeat_layer(state: State) -> None:
    for name, matrix in experts_of(state, 1).items():
        for expert in range(EXPERTS):
            matrix(expert).copy_(experts_of(state, 0)[name.replace("layers.1", "layers.0")](expert))


def repeat_expert(state: State) -> None:
    for matrix in experts_of(state, 1).values():
        matrix(5).copy_(matrix(2))


def router_of_a_rank(state: State) -> None:
    for name in list(state):
        if name.endswith((".gate.weight", "router.weight", "router.layer.weight")):
            state[name] = state[name][: EXPERTS // 2]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("plant", "says"),
    [
        (keep_half, "of 4 of 8 experts is missing: expert(s) 4-7"),
        (tile, "expert(s) 4-7 repeats expert(s) 0-3 of the same layer"),
        (repeat_layer, "expert(s) 0-7 repeats expert(s) 0-7 of model.layers.0"),
        (repeat_expert, "expert(s) 5 repeats expert(s) 2 of the same layer"),
        (change(3, lambda value: value.zero_()), "is zero in expert(s) 3"),
        (change(6, lambda value: value.view(-1)[3:4].fill_(float("nan"))), "has NaN in expert(s) 6"),
        (change(1, lambda value: value.view(-1)[:1].fill_(float("inf"))), "has infinity in expert(s) 1"),
        (router_of_a_rank, "has shape (4, 12) for 8 experts"),
        (change(2, lambda value: value[: len(value) // 2].zero_()), "half or more of its rows zero in expert(s) 2"),
    ],
    ids=["one rank's experts", "tiled", "layer", "expert", "zeros", "nan", "infinity", "router", "rows of zeros"],
)
def test_audit_of_a_planted_fault_names_it(tmp_path: Path, family: str, plant: Plant, says: str):
    state = build(family)
    plant(state)
    assert says in messages(audit(write(tmp_path, family, state)))


@pytest.mark.parametrize("family", FAMILIES)
def test_audit_of_a_healthy_model_finds_nothing(tmp_path: Path, family: str):
    found = audit(write(tmp_path / "a", family, build(family)))
    assert not found.findings
    assert len(found.facts) >= 6
    one = write(tmp_path / "b", family, build(family), shards=1)
    (one / "model.safetensors.index.json").unlink()
    assert not audit(one, tmp_path / "a").findings


def upcycled(state: State) -> None:
    for layer in range(2):
        for matrix in experts_of(state, layer).values():
            for expert in range(1, EXPERTS):
                matrix(expert).copy_(matrix(0))


def in_bfloat16(state: State) -> None:
    state |= {name: value.bfloat16() for name, value in state.items()}


def with_zero_biases(state: State) -> None:
    moe = "mlp" if any(".mlp." in name for name in state) else "block_sparse_moe"
    state[f"model.layers.0.{moe}.experts.bias"] = torch.zeros(EXPERTS, 4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("change", [upcycled, in_bfloat16, with_zero_biases])
def test_audit_of_a_healthy_variant_finds_nothing(tmp_path: Path, family: str, change: Plant):
    state = build(family)
    change(state)
    assert not audit(write(tmp_path, family, state)).findings


@pytest.mark.parametrize(
    ("file", "text"), [("mergekit_moe_config.yml", ""), ("config.json", '{"upcycled_shards": 2, "num_experts": 8}')]
)
def test_audit_of_declared_copies_finds_nothing(tmp_path: Path, file: str, text: str):
    state = build("qwen3_moe")
    tile(state)
    write(tmp_path, "qwen3_moe", state)
    (tmp_path / file).write_text(text)
    assert not audit(tmp_path).findings


def test_audit_of_untied_weights_that_config_ties_names_them(tmp_path: Path):
    state = build("granitemoe")
    state["lm_head.weight"] += 1
    assert "lm_head.weight differs from model.embed_tokens.weight" in messages(
        audit(write(tmp_path, "granitemoe", state))
    )


def test_audit_of_mixed_types_names_the_odd_expert(tmp_path: Path):
    state = build("mixtral")
    name = "model.layers.1.block_sparse_moe.experts.2.w1.weight"
    state[name] = state[name].half()
    (finding,) = audit(write(tmp_path, "mixtral", state)).findings
    assert finding.tensors == [name]
    assert "has several types, F32, F16: expert(s) 2" in finding.message


def test_audit_of_an_expert_beyond_the_configured_number_names_it(tmp_path: Path):
    state = build("qwen3_moe")
    write(tmp_path, "qwen3_moe", state, num_experts=6)
    assert "down_proj.weight of experts beyond 6: expert(s) 6-7" in messages(audit(tmp_path))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_audit_against_the_base_finds_experts_in_another_order(tmp_path: Path, family: str, noise: float):
    base, state = build(family), build(family)
    for matrix in experts_of(state, 1).values():
        first = matrix(1).clone()
        matrix(1).copy_(matrix(4))
        matrix(4).copy_(first)
    draw = torch.Generator().manual_seed(1)
    state = {name: value + noise * torch.randn(value.shape, generator=draw) for name, value in state.items()}
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    write(tmp_path / "base", family, base)
    found = audit(write(tmp_path / "model", family, state), tmp_path / "base")
    assert "order: model.layers.1" in messages(found)
    assert "1 is 4, 4 is 1" in messages(found)
    assert len(found.findings) == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_audit_against_the_base_finds_swapped_gate_and_up(tmp_path: Path, family: str):
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


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("plant", [keep_rows, transpose, initialize])
def test_audit_against_the_base_finds_experts_of_other_shapes_and_values(tmp_path: Path, family: str, plant: Plant):
    base, state = build(family), build(family)
    plant(state)
    write(tmp_path / "base", family, base)
    found = audit(write(tmp_path / "model", family, state), tmp_path / "base")
    # A square matrix keeps its shape when it is transposed.
    assert ("order" if plant is initialize else "base") in {each.check for each in found.findings} <= {"base", "order"}


def edit_index(folder: Path, edit: Callable[[dict[str, str]], Any]) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    edit(index["weight_map"])
    path.write_text(json.dumps(index))


def test_audit_of_a_missing_file_and_entries_names_them(tmp_path: Path):
    write(tmp_path, "mixtral", build("mixtral"))
    edit_index(tmp_path, lambda entries: entries.pop("model.norm.weight"))
    edit_index(tmp_path, lambda entries: entries.update({"model.other.weight": "model-00001-of-00003.safetensors"}))
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    said = messages(audit(tmp_path))
    assert "model.safetensors.index.json names model-00002-of-00003.safetensors, which is missing" in said
    assert "has model.other.weight in model-00001-of-00003.safetensors, which does not have it" in said


def distributed(folder: Path, state: dict[str, Any]) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of one process
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS["qwen3_moe"]))
    return folder


def test_audit_of_a_distributed_checkpoint_reads_it(tmp_path: Path):
    state = build("qwen3_moe")
    healthy = distributed(tmp_path / "healthy", dict(state))
    assert not audit(healthy).findings
    keep_half(state)
    half = distributed(tmp_path / "half", dict(state))
    assert "of 4 of 8 experts is missing: expert(s) 4-7" in messages(audit(half))


@pytest.mark.parametrize("fault", ["none", "shape", "other expert"])
def test_audit_of_moments_finds_those_of_other_gradients(tmp_path: Path, fault: str):
    state = build("qwen3_moe")
    name = "model.layers.0.mlp.experts.0.gate_proj.weight"
    mean, square = state[name] / 10, (state[name] / 10).square()
    if fault == "shape":
        mean = mean[:3]
    if fault == "other expert":
        square = square.flip(0) * 1e-3
    moments = {f"optim.state.{name}.exp_avg": mean, f"optim.state.{name}.exp_avg_sq": square}
    said = messages(audit(distributed(tmp_path, state | moments)))
    says = {
        "none": "",
        "shape": f"{name}: exp_avg has shape",
        "other expert": f"{name}: exp_avg and exp_avg_sq are not of",
    }
    assert said == "" if fault == "none" else says[fault] in said
