"""Audits of checkpoints report planted faults, and nothing in healthy checkpoints that resemble broken ones."""

import json
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from benchmarks.support.families import tiny_config
from tests.audit.models import CONFIGS, EXPERTS, WIDTH, State, build, copy_experts, experts_of, write
from toolkit.audit.checks import Audit, audit
from toolkit.errors import UserError
from toolkit.integrations.transformers import causal_lm

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


ROUTERS = ".gate.weight", "router.weight", "router.layer.weight"


def cut_router(state: State) -> None:
    state |= {name: value[: EXPERTS // 2] for name, value in state.items() if name.endswith(ROUTERS)}


def change_router(do: Callable[[torch.Tensor], object]) -> Plant:
    return lambda state: do(next(value for name, value in state.items() if name.endswith(ROUTERS)))


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
        "a quarter or more of its rows or columns zero in expert(s) 2",
    ),
    "zero columns": (change(2, lambda value: value[:, 2:5].zero_()), "rows or columns zero in expert(s) 2"),
    "small": (change(3, lambda value: value.mul_(1e-6)), "has a norm far from other experts' in expert(s) 3"),
    "constant": (change(4, lambda value: value.fill_(0.5)), "is constant in expert(s) 4"),
    "saturated": (change(4, lambda value: value.clamp_(-0.5, 0.5)), "is saturated in expert(s) 4"),
    "zero row of router": (change_router(lambda rows: rows[2].zero_()), "is zero in the rows of expert(s) 2"),
    "repeated row": (
        change_router(lambda rows: rows[5].copy_(rows[2])),
        "rows of expert(s) 5 repeat those of expert(s) 2",
    ),
    "placeholders": (
        lambda state: [value.set_(torch.empty(0)) for value in state.values()],
        "have no values, as ZeRO-3",
    ),
    "wrapper": (lambda state: state.update({f"module.{name}": state.pop(name) for name in list(state)}), "prefix"),
}


@families
@pytest.mark.parametrize(("plant", "message"), FAULTS.values(), ids=FAULTS)
def test_audit_of_planted_fault_reports_experts(tmp_path: Path, family: str, plant: Plant, message: str):
    state = build(family)
    plant(state)
    assert message in messages(audit(write(tmp_path, family, state)))


@pytest.fixture(scope="module", params=["mixtral", "gpt_oss"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of transformers with four layers."""
    folder: Path = tmp_path_factory.mktemp(request.param)
    causal_lm(tiny_config(request.param, num_hidden_layers=4)).save_pretrained(folder)
    return folder


ABSENT = {
    r"layers\.2\.": "model.layers.2: lacks ",
    r"layers\.[23]\.": "model.layers.2-3: lacks ",
    r"layers\.1\..*experts": "model.layers.1: lacks ",
    r"experts.*(w2|down_proj)": "model.layers.0-3: lacks ",
    r"q_proj|norm\.weight": "the model: lacks model.norm.weight",
}


@pytest.mark.parametrize("pattern", ABSENT)
@pytest.mark.parametrize("source", ["transformers' ", "the base has", "most layers have"])
def test_audit_of_missing_tensors_names_layers(saved: Path, tmp_path: Path, pattern: str, source: str):
    shutil.copy(saved / "config.json", tmp_path)
    if source == "most layers have":  # as of a family that transformers does not have
        config = (saved / "config.json").read_text().replace('"model_type": "', '"model_type": "new-')
        (tmp_path / "config.json").write_text(config)
    state = load_file(saved / "model.safetensors")
    kept = {name: value for name, value in state.items() if not re.search(pattern, name)}
    save_file(state, tmp_path / "model.safetensors")
    base = saved if "base" in source else None
    assert not audit(tmp_path, base).findings
    save_file(kept, tmp_path / "model.safetensors")
    found = [each.message for each in audit(tmp_path, base).findings if each.check == "missing"]
    is_seen = "layers" in pattern or "most" not in source  # other layers can only say which experts they have
    assert any(each.startswith(ABSENT[pattern]) and source in each for each in found) == is_seen
    assert is_seen or not found


def test_audit_of_different_tied_weights_reports_them(tmp_path: Path):
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


def audit_against_base(tmp_path: Path, family: str, state: State) -> Audit:
    write(tmp_path / "base", family, build(family))
    return audit(write(tmp_path / "model", family, state), tmp_path / "base")


@families
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_audit_against_base_reports_order_of_experts(tmp_path: Path, family: str, noise: float):
    state, draw = copy_experts(build(family), 1, {1: 4, 4: 1}), torch.Generator().manual_seed(1)
    state = {name: value + noise * torch.randn(value.shape, generator=draw) for name, value in state.items()}
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    found = audit_against_base(tmp_path, family, state)
    assert "order: model.layers.1" in messages(found)
    assert "1 is 4, 4 is 1" in messages(found)
    assert len(found.findings) == 1


@families
def test_audit_against_base_reports_swapped_gate_and_up(tmp_path: Path, family: str):
    state = build(family)
    names = list(experts_of(state, 0))
    for expert in (0, 3):
        if len(names) == 3 and family != "gpt_oss":
            gate, up = (experts_of(state, 0)[name](expert) for name in names[:2])
            gate[:], up[:] = up.clone(), gate.clone()
        else:
            fused = experts_of(state, 0)[names[0]](expert)
            fused.copy_(fused.roll(WIDTH, 1 if family == "gpt_oss" else 0))
    found = audit_against_base(tmp_path, family, state)
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


def reorder(state: State, part: str, order: Callable[[torch.Tensor], torch.Tensor]) -> None:
    state |= {name: order(state[name]).contiguous() for name in matrices(state) if re.search(part, name)}


def swap_outputs(state: State) -> None:
    last = list(experts_of(state, 1).values())[-1]
    one, other = last(2).clone(), last(6).clone()
    last(2).copy_(other), last(6).copy_(one)


def roll_router(state: State) -> None:
    change_router(lambda rows: rows.copy_(rows.roll(1, 0).clone()))(state)


def zero_matrices(state: State) -> None:
    state |= {name: torch.zeros_like(state[name]) for name in matrices(state) if "layers.1" in name}


BEYOND_SHAPES: list[tuple[Plant, str, str]] = [
    (keep_rows, "base", "has shape"),
    (transpose, "base", "has shape"),
    (initialize, "order", "are like no expert of the base"),
    (swap_outputs, "order", "of experts is in another order than in the base: 2 is 6, 6 is 2"),
    (lambda state: reorder(state, "w1|gate|input", lambda value: value.roll(1, -2)), "order", "rows in another order"),
    (lambda state: reorder(state, "", lambda value: value * 3), "scale", "has 3 times the norm of the base"),
    (roll_router, "router", "rows are in another order than in the base: 0 is 7"),
    (zero_matrices, "values", "is zero in expert(s) 0-7"),
    (lambda state: state["model.layers.1.self_attn.q_proj.weight"].zero_(), "values", "is zero, and not in the base"),
]


@families
@pytest.mark.parametrize(("plant", "check", "message"), BEYOND_SHAPES)
def test_audit_against_base_reports_other_shapes_and_values(
    tmp_path: Path, family: str, plant: Plant, check: str, message: str
):
    state = build(family)
    plant(state)
    found = audit_against_base(tmp_path, family, state).findings
    assert any(each.check == check and message in each.message for each in found), found
    # A square matrix keeps its shape when it is transposed.
    assert {each.check for each in found} <= {check, "order"}


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
        warnings.simplefilter("ignore")  # warns about a single process
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS["qwen3_moe"]))
    return folder


@pytest.mark.parametrize("keys", ["model optimizer", "model optim", "app.model app.optim"])
def test_audit_of_distributed_checkpoint_finds_model_and_optimizer(tmp_path: Path, keys: str):
    model, optimizer = keys.split()
    state = build("qwen3_moe")
    moments = {
        f"{optimizer}.state.{name}.{moment}": value.square()
        for name, value in state.items()
        for moment in ("exp_avg", "exp_avg_sq")
    }
    saved = {f"{model}.{name}": value for name, value in state.items()} | moments
    write_distributed(tmp_path / "healthy", saved)
    found = audit(tmp_path / "healthy", write(tmp_path / "base", "qwen3_moe", state))
    assert not found.findings
    assert f"optimizer states of {len(state)} weights fit them" in found.facts
    assert "experts, gates and ups of 2 layers are bitwise equal to the base" in found.facts
    some = {key: value for key, value in saved.items() if not re.search(r"state.*layers\.1.*experts.*down", key)}
    (finding,) = audit(write_distributed(tmp_path / "half", some)).findings
    assert "layers.1.mlp.experts.*.down_proj.weight: has no optimizer states" in finding.message
    assert "has no weights" in messages(audit(write_distributed(tmp_path / "alone", moments)))


def test_audit_of_single_and_pickled_files_reads_them(tmp_path: Path):
    state = build("mixtral")
    write(tmp_path, "mixtral", state, shards=1)
    assert not audit(next(tmp_path.glob("*.safetensors"))).findings
    keep_half(state)
    for name, saved in (("pytorch_model.bin", state), ("checkpoint.pt", {"model": state, "step": 1})):
        torch.save(saved, tmp_path / name)
        assert "of 4 of 8 experts is missing: expert(s) 4-7" in messages(audit(tmp_path / name))


@pytest.mark.parametrize(
    ("file", "program"),
    [
        ("iter_0000100/mp_rank_00/model_optim_rng.pt", "Megatron-LM"),
        ("layer_0_expert_1_mp_rank_00_model_states.pt", "DeepSpeed"),
    ],
)
def test_audit_of_foreign_files_names_program_and_conversion(tmp_path: Path, file: str, program: str):
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).touch()
    with pytest.raises(UserError, match=f"a file of {program}. Write safetensors files with "):
        audit(tmp_path)


def test_audit_of_optimizer_moments_reports_mismatch(tmp_path: Path):
    state = build("qwen3_moe")
    name = "model.layers.0.mlp.experts.0.gate_proj.weight"
    mean, square = state[name] / 10, (state[name] / 10).square()
    assert not moments_messages(tmp_path / "healthy", state, name, mean, square)
    assert f"{name}: exp_avg has shape" in moments_messages(tmp_path / "shape", state, name, mean[:3], square)
    other = moments_messages(tmp_path / "expert", state, name, mean, square.flip(0) * 1e-3)
    assert f"{name}: exp_avg and exp_avg_sq are not of" in other


def moments_messages(folder: Path, state: State, name: str, mean: torch.Tensor, square: torch.Tensor) -> str:
    moments = {f"optim.state.{name}.exp_avg": mean, f"optim.state.{name}.exp_avg_sq": square}
    return messages(audit(write_distributed(folder, state | moments)))


Variant = Callable[[State, str], dict[str, Any] | None]
"""Edits the state of a family; returns fields of its configuration."""


@families
def test_audit_of_healthy_model_finds_nothing(tmp_path: Path, family: str):
    found = audit(write(tmp_path / "a", family, build(family)))
    assert not found.findings
    assert len(found.facts) >= 6
    one = write(tmp_path / "b", family, build(family), shards=1)
    (one / "model.safetensors.index.json").unlink()
    assert not audit(one, tmp_path / "a").findings
    each_in_a_file = write(tmp_path / "c", family, build(family), shards=len(build(family)) + 1)  # the last is empty
    assert not audit(each_in_a_file).findings


def experts_field(family: str) -> str:
    return next(name for name in CONFIGS[family] if "experts" in name)


def prune(state: State, layer: int) -> None:
    """Keep six experts of a layer, with their rows of the router."""
    for name in [name for name in state if name.startswith(f"model.layers.{layer}.") and "attn" not in name]:
        number = name.partition(".experts.")[2].partition(".")[0]
        if not number.isdigit():
            state[name] = state[name][:6]
        elif int(number) >= 6:
            del state[name]


def upcycled(state: State, _: str) -> None:
    for layer in range(2):
        copy_experts(state, layer, dict.fromkeys(range(1, EXPERTS), 0))


def pruned(state: State, family: str) -> dict[str, Any]:
    prune(state, 0)
    prune(state, 1)
    return {experts_field(family): 6}


def pruned_by_layer(state: State, family: str) -> dict[str, Any]:
    prune(state, 1)
    return {experts_field(family): [EXPERTS, 6]}


def upcycled_by_groups(state: State, _: str) -> None:
    tile(state)
    state |= {name: value[:4].repeat(2, 1) for name, value in state.items() if name.endswith(ROUTERS)}


def with_copied_last_layer(state: State, _: str) -> dict[str, Any]:
    """Begin multi-token prediction as the last layer."""
    last = {name: value.clone() for name, value in state.items() if "layers.1." in name}
    state |= {name.replace("layers.1.", "mtp.layers.0."): value for name, value in last.items()}
    return {"num_hidden_layers": 2, "vocab_size": "of a family that transformers does not have"}


def pruned_below_maximum(state: State, _: str) -> None:
    prune(state, 1)


def with_router_in_float32(state: State, _: str) -> None:
    is_router = {name for name in state if "gate.weight" in name or "router" in name}
    state |= {name: value.bfloat16() for name, value in state.items() if name not in is_router}


def with_untrained_biases(state: State, _: str) -> None:
    """Add biases, which are zero in an expert that got no tokens."""
    bias = torch.randn(EXPERTS, 4)
    bias[3] = 0
    moe = "mlp" if any(".mlp." in name for name in state) else "block_sparse_moe"
    state |= {f"model.layers.{layer}.{moe}.experts.bias": bias for layer in range(2)}


def tied(state: State, _: str) -> dict[str, Any]:
    del state["lm_head.weight"]
    return {"tie_word_embeddings": True}


def padded_vocabulary(state: State, _: str) -> None:
    state["model.embed_tokens.weight"][-3:] = 0
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()


@families
@pytest.mark.parametrize(
    "variant",
    [
        upcycled,
        upcycled_by_groups,
        with_copied_last_layer,
        pruned,
        pruned_by_layer,
        pruned_below_maximum,
        with_router_in_float32,
        with_untrained_biases,
        tied,
        padded_vocabulary,
    ],
)
def test_audit_of_healthy_variant_finds_nothing(tmp_path: Path, family: str, variant: Variant):
    state = build(family)
    fields = variant(state, family) or {}
    assert not audit(write(tmp_path, family, state, **fields)).findings


@pytest.mark.parametrize(
    ("file", "text"), [("mergekit_moe_config.yml", ""), ("config.json", '{"upcycled_shards": 2, "num_experts": 8}')]
)
def test_audit_of_declared_copies_finds_nothing(tmp_path: Path, file: str, text: str):
    state = build("qwen3_moe")
    tile(state)
    write(tmp_path, "qwen3_moe", state)
    (tmp_path / file).write_text(text)
    assert not audit(tmp_path).findings
