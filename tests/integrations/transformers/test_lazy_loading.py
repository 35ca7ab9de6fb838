"""Lazily loaded models train, migrate and are saved like fully loaded models."""

import copy
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from benchmarks.support.families import EXPERTS, model_of, tokens
from benchmarks.support.processes import run_distributed
from tests.integrations.accelerate.toy import error_of
from tests.integrations.peft.models import add_adapters
from tests.integrations.transformers.training import prepare, train_step
from toolkit.errors import UserError
from toolkit.experts.layer.stack import expert_stacks
from toolkit.experts.parallel.groups import ExpertGroups, make_expert_groups
from toolkit.experts.placement.placement import ExpertPlacement
from toolkit.experts.sharding.find import experts_modules
from toolkit.experts.sharding.shard import shard_experts
from toolkit.integrations.transformers import causal_lm, experts_in_files, place_experts, use_toolkit_kernel

PLACED = ExpertPlacement(((6, 0, 3, 1), (5, 2, 7, 4)))
MOVED = ExpertPlacement(((2, 5, 0, 7), (1, 6, 4, 3)))


def save_model(folder: Path, **options: Any) -> Path:
    model_of("qwen3_moe").save_pretrained(folder, **options)
    return folder


def load_lazily(folder: Path, **options: Any) -> Any:
    with experts_in_files(**options):
        return causal_lm(folder, experts_implementation=use_toolkit_kernel() if "offload" in options else None)


def train(folder: Path, result: Path, adapters: bool, options: dict[str, Any] | None) -> list[float]:
    """Return the losses of three clipped steps with migrations in between, and save the model as `result`."""
    model: Any = causal_lm(folder) if options is None else load_lazily(folder, **options)
    if adapters:
        model = add_adapters(model, r=2)
    experts, wrapped, optimizer = prepare(model, ep_size=2, placement=lambda *_: PLACED)
    losses = []
    with experts:
        for step in range(3):
            losses.append(train_step(experts.accelerator, wrapped, optimizer, step, samples=4, clip=0.5))
            place_experts(model, (MOVED, PLACED)[step % 2], optimizer)
        model.save_pretrained(result)
    return losses


@pytest.mark.parametrize("adapters", [False, True])
def test_lazily_loaded_model_trains_and_saves_as_full_model(tmp_path: Path, adapters: bool):
    folder = save_model(tmp_path / "model", max_shard_size="30KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    ways: dict[str, Any] = {"full": None, "lazy": {}}
    if adapters:
        ways["offloaded"] = {"offload": tmp_path}
    found = {name: run_distributed(train, 2, folder, tmp_path / name, adapters, way) for name, way in ways.items()}
    expected = {path.name: path.read_bytes() for path in (tmp_path / "full").glob("*.safetensors")}
    for way in ways:
        assert found[way] == found["full"]
        assert {path.name: path.read_bytes() for path in (tmp_path / way).glob("*.safetensors")} == expected


def _mapped_bytes(folder: Path) -> int:
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = [line.split()[0].split("-") for line in lines if str(folder) in line]
    return sum(int(end, 16) - int(start, 16) for start, end in spans)


def test_experts_offloaded_to_folder_are_mapped_from_unnamed_files(tmp_path: Path):
    folder, offload = save_model(tmp_path / "model"), tmp_path / "offloaded"
    offload.mkdir()
    model = load_lazily(folder, offload=offload).requires_grad_(False)
    for module in experts_modules(model).values():
        module.down_proj.requires_grad_(True)  # trained parameters are in memory
    shard_experts(model, ExpertGroups())
    frozen = sum(module.gate_up_proj.nbytes for module in experts_modules(model).values())
    assert 0 < frozen <= _mapped_bytes(offload) < frozen + 2 * 4096 * EXPERTS
    assert not any(offload.iterdir())
    full = causal_lm(folder).state_dict()
    assert all(torch.equal(value, full[name]) for name, value in model.state_dict().items())
    for each in (model, copy.deepcopy(model)):
        offloaded = {f"{layer}.{name}" for layer, stack in expert_stacks(each).items() for name in stack.computed_on}
        assert offloaded == {name for name in full if name.endswith("gate_up_proj")}


def resident(model: nn.Module) -> int:
    return sum(parameter.untyped_storage().nbytes() for parameter in model.parameters())


def test_lazy_experts_before_sharding_use_no_memory_and_can_be_cast(tmp_path: Path):
    folder = save_model(tmp_path)
    full, model = causal_lm(folder), load_lazily(folder)
    experts = sum(p.nbytes for module in experts_modules(full).values() for p in module.parameters())
    assert resident(model) < resident(full) - experts + 64
    before = resident(model)
    assert resident(model.to(torch.bfloat16)) == before / 2
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    expected = full.to(torch.bfloat16).state_dict()
    for each in (copy.deepcopy(model), model):
        shard_experts(each, ExpertGroups())
        assert all(torch.equal(value, expected[name]) for name, value in each.state_dict().items())


def test_forward_and_save_with_lazy_experts_raise(tmp_path: Path):
    model = load_lazily(save_model(tmp_path / "model"))
    with pytest.raises(UserError, match=r"still in their files"):
        model(tokens(0, 2))
    names = [name for name, value in model.state_dict().items() if value.is_meta]
    assert len(names) == 2 * len(experts_modules(model))
    with pytest.raises(Exception, match=r"meta"):
        model.save_pretrained(tmp_path / "again")
    shard_experts(model, ExpertGroups())
    assert not any(value.is_meta for value in model.state_dict().values())


def prepare_frozen(folder: Path) -> None:
    model = load_lazily(folder)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("q_proj" in name)
    rest = {name: p.data_ptr() for name, p in model.named_parameters() if ".experts." not in name}
    _, wrapped, _ = prepare(model, ep_size=1)
    found = dict(wrapped.module.named_parameters())
    assert {name: found[name].data_ptr() for name in rest} == rest
    assert set(wrapped.parameters_to_ignore) == found.keys() - rest.keys()


def test_prepare_on_cpu_keeps_storage_and_excludes_frozen_experts_from_ddp(tmp_path: Path):
    run_distributed(prepare_frozen, 2, save_model(tmp_path))


def _truncate(folder: Path) -> None:
    file = next(folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-100])


def _remove(folder: Path, prefix: str) -> None:
    file = folder / "model.safetensors"
    state = {name: value for name, value in load_file(file).items() if not name.startswith(prefix)}
    save_file(state, file, metadata={"format": "pt"})


def _double_num_experts(folder: Path) -> None:
    settings = json.loads((folder / "config.json").read_text())
    more = dict.fromkeys(("num_experts", "num_local_experts"), 2 * EXPERTS)
    (folder / "config.json").write_text(json.dumps(settings | more))


def test_shard_experts_of_layer_without_tensors_raises(tmp_path: Path):
    _remove(save_model(tmp_path), "model.layers.1.mlp.experts")
    model = load_lazily(tmp_path)
    message = r"'model\.layers\.1\.mlp\.experts\..*' cannot be read from files \(the files lack it\)"
    with pytest.raises(UserError, match=message):
        shard_experts(model, ExpertGroups())


def shard_truncated(folder: Path) -> str:
    """Return the error after the files of rank 1 were truncated."""
    rank = dist.get_rank()
    model = load_lazily(folder / str(rank))
    if rank == 1:
        _truncate(folder / "1")
    return error_of(shard_experts, model, make_expert_groups(2))


def test_shard_experts_with_unreadable_file_on_one_rank_raises_on_all(tmp_path: Path):
    for rank in range(2):
        save_model(tmp_path / str(rank))
    first, second = run_distributed(shard_truncated, 2, tmp_path)
    assert first == second
    assert str(tmp_path / "1" / "model.safetensors") in first


def test_lazy_loading_with_quantization_config_raises(tmp_path: Path):
    from transformers import BitsAndBytesConfig

    folder = save_model(tmp_path)
    with experts_in_files(), pytest.raises(UserError, match="files are quantised"):
        causal_lm(folder, quantization_config=BitsAndBytesConfig(load_in_8bit=True))


def _change(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.experts.2.up_proj.weight"
    save_file(tensors | {name: change(tensors[name])}, folder / "model.safetensors", metadata={"format": "pt"})


REMOVED = r"lack \d weight|have 7 rows|cannot be read \(RuntimeError: .*ize"
INTEGERS = r"model\.layers\.0\.mlp\.experts\.2\.up_proj\.weight in .* has type"
ROWS = r"files have 7 rows or tensors like 'model\.layers\.1\..*up_proj.*' for 8 experts"
DAMAGES: dict[str, tuple[Any, str]] = {
    "gate": (partial(_remove, prefix="model.layers.1.mlp.gate.weight"), REMOVED),
    "query": (partial(_remove, prefix="model.layers.1.self_attn.q_proj.weight"), REMOVED),
    "embedding": (partial(_remove, prefix="model.embed_tokens.weight"), REMOVED),
    "expert": (partial(_remove, prefix="model.layers.1.mlp.experts.3"), REMOVED),
    "int8": (partial(_change, change=Tensor.char), INTEGERS),
    "int32": (partial(_change, change=Tensor.int), INTEGERS),
    "bool": (partial(_change, change=Tensor.bool), INTEGERS),
}
LAZY_DAMAGES: dict[str, tuple[Any, str]] = {
    "truncated": (_truncate, r"model\.safetensors: cannot be read \(.*\)\. Download or copy the model again"),
    "matrix": (partial(_remove, prefix="model.layers.1.mlp.experts.5.up_proj"), ROWS),
    "one row": (partial(_change, change=lambda x: x[:1].clone()), "have several shapes"),
    "config": (_double_num_experts, r"files have 8 rows or tensors like .* for 16 experts"),
}


@pytest.mark.parametrize(
    ("load", "damage"),
    [(causal_lm, name) for name in DAMAGES] + [(load_lazily, name) for name in DAMAGES | LAZY_DAMAGES],
)
def test_load_of_damaged_files_raises(tmp_path: Path, load: Any, damage: str):
    edit, message = (DAMAGES | LAZY_DAMAGES)[damage]
    edit(save_model(tmp_path))
    with pytest.raises(UserError, match=message):
        load(tmp_path)
