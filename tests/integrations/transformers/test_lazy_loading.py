"""A lazily loaded model trains, migrates and is saved as one that was read whole."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

from tests.integrations.transformers.families import EXPERTS, awaken, config, tokens
from tests.support.helpers import run_distributed
from toolkit.errors import UserError
from toolkit.experts.layer.stack import expert_stacks
from toolkit.experts.parallel.groups import ExpertGroups, make_expert_groups
from toolkit.experts.placement.placement import ExpertPlacement
from toolkit.experts.sharding.find import require_experts
from toolkit.experts.sharding.shard import shard_experts
from toolkit.integrations.accelerate.expert_parallel import ExpertParallel
from toolkit.integrations.transformers import causal_lm, experts_in_files, place_experts, use_toolkit_kernel

PLACED = ExpertPlacement(((6, 0, 3, 1), (5, 2, 7, 4)))
MOVED = ExpertPlacement(((2, 5, 0, 7), (1, 6, 4, 3)))


def saved(folder: Path, family: str = "qwen3_moe", **options: Any) -> Path:
    """A folder with a small model, as transformers saves it."""
    torch.manual_seed(0)
    awaken(causal_lm(config(family))).save_pretrained(folder, **options)
    return folder


def unread(folder: Path, **options: Any) -> Any:
    """The model of `folder`, with its experts in their files."""
    with experts_in_files(**options):
        return causal_lm(folder, experts_implementation=use_toolkit_kernel() if "offload" in options else None)


def losses(folder: Path, result: Path, *, adapters: bool, options: dict[str, Any] | None) -> list[float]:
    """Losses of three clipped steps, between which experts move; saves the model as `result`."""
    from accelerate import Accelerator
    from peft import LoraConfig, get_peft_model

    model: Any = causal_lm(folder) if options is None else unread(folder, **options)
    if adapters:
        tables = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        torch.manual_seed(1)
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], target_parameters=tables))
    optimizer: Any = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    accelerator = Accelerator(cpu=True)
    with ExpertParallel(accelerator, ep_size=2, placement=lambda *_: PLACED) as experts:
        wrapped, optimizer = experts.prepare(model, optimizer)
        found, rank = [], dist.get_rank()
        for step in range(3):
            ids = tokens(step, 4)[2 * rank : 2 * rank + 2]
            loss = wrapped(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
            place_experts(model, (MOVED, PLACED)[step % 2], optimizer)
        model.save_pretrained(result)
    return found


@pytest.mark.parametrize("adapters", [False, True])
def test_experts_in_files_on_two_ranks_train_and_save_as_a_whole_model(tmp_path: Path, adapters: bool):
    folder = saved(tmp_path / "model", max_shard_size="30KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    ways: dict[str, Any] = {"whole": None, "in files": {}}
    if adapters:
        ways["offloaded"] = {"offload": tmp_path}
    found = {name: run_distributed(_losses, 2, folder, tmp_path / name, adapters, way) for name, way in ways.items()}
    files = sorted(path.name for path in (tmp_path / "whole").glob("*.safetensors"))
    for way in ways:
        assert found[way] == found["whole"]
        assert files == sorted(path.name for path in (tmp_path / way).glob("*.safetensors"))
        for name in files:
            assert (tmp_path / way / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def _losses(folder: Path, result: Path, adapters: bool, options: dict[str, Any] | None) -> list[float]:
    return losses(folder, result, adapters=adapters, options=options)


def _mapped_bytes(folder: Path) -> int:
    """Of files below `folder` that are mapped into this process, whether they have a name or not."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = [line.split()[0].split("-") for line in lines if str(folder) in line]
    return sum(int(end, 16) - int(start, 16) for start, end in spans)


def test_experts_in_files_offloaded_to_a_folder_are_mapped_from_unnamed_files(tmp_path: Path):
    folder, where = saved(tmp_path / "model"), tmp_path / "offloaded"
    where.mkdir()
    model = unread(folder, offload=where).requires_grad_(False)
    for module in require_experts(model).values():
        module.down_proj.requires_grad_(True)  # to be trained, and so in memory
    shard_experts(model, ExpertGroups())
    frozen = sum(module.gate_up_proj.nbytes for module in require_experts(model).values())
    assert 0 < frozen <= _mapped_bytes(where) < frozen + 2 * 4096 * EXPERTS
    assert not any(where.iterdir())
    whole = causal_lm(folder).state_dict()
    assert all(torch.equal(value, whole[name]) for name, value in model.state_dict().items())
    for each in (model, copy.deepcopy(model)):
        stay = {f"{layer}.{name}" for layer, stack in expert_stacks(each).items() for name in stack.computed_on}
        assert stay == {name for name in whole if name.endswith("gate_up_proj")}


def resident(model: nn.Module) -> int:
    return sum(parameter.untyped_storage().nbytes() for parameter in model.parameters())


def test_experts_in_files_before_sharding_take_no_memory_and_follow_casts(tmp_path: Path):
    folder = saved(tmp_path)
    whole, model = causal_lm(folder), unread(folder)
    experts = sum(p.nbytes for module in require_experts(whole).values() for p in module.parameters())
    assert resident(model) < resident(whole) - experts + 64
    before = resident(model)
    assert resident(model.to(torch.bfloat16)) == before / 2
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    expected = whole.to(torch.bfloat16).state_dict()
    for each in (copy.deepcopy(model), model):
        shard_experts(each, ExpertGroups())
        assert all(torch.equal(value, expected[name]) for name, value in each.state_dict().items())


def test_experts_in_files_before_sharding_cannot_be_called_or_saved(tmp_path: Path):
    model = unread(saved(tmp_path / "model"))
    with pytest.raises(UserError, match=r"still in their files"):
        model(tokens(0, 2))
    names = [name for name, value in model.state_dict().items() if value.is_meta]
    assert len(names) == 2 * len(require_experts(model))
    with pytest.raises(Exception, match=r"meta"):
        model.save_pretrained(tmp_path / "again")
    shard_experts(model, ExpertGroups())
    assert not any(value.is_meta for value in model.state_dict().values())


def _places(folder: Path) -> None:
    """Whether `prepare` leaves parameters where they are, and frozen experts out of DDP's broadcast."""
    from accelerate import Accelerator

    model = unread(folder).requires_grad_(False)
    trained = [p for name, p in model.named_parameters() if "q_proj" in name]
    for parameter in trained:
        parameter.requires_grad_(True)
    rest = {name: p.data_ptr() for name, p in model.named_parameters() if ".experts." not in name}
    optimizer = torch.optim.AdamW(trained)
    wrapped, _ = ExpertParallel(Accelerator(cpu=True), ep_size=1).prepare(model, optimizer)
    found = dict(wrapped.module.named_parameters())
    assert {name: found[name].data_ptr() for name in rest} == rest
    assert set(wrapped.parameters_to_ignore) == found.keys() - rest.keys()


def test_prepare_on_cpu_copies_no_parameter_and_broadcasts_no_frozen_expert(tmp_path: Path):
    run_distributed(_places, 2, saved(tmp_path))


def _truncate(folder: Path) -> None:
    file = next(folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-100])


def _forget(folder: Path, names: str) -> None:
    """Remove the tensors whose names begin so."""
    file = folder / "model.safetensors"
    state = {name: value for name, value in load_file(file).items() if not name.startswith(names)}
    save_file(state, file, metadata={"format": "pt"})


def _forget_an_expert(folder: Path) -> None:
    _forget(folder, "model.layers.1.mlp.experts.5.up_proj")


def _count_more_experts(folder: Path) -> None:
    settings = json.loads((folder / "config.json").read_text())
    more = dict.fromkeys(("num_experts", "num_local_experts"), 2 * EXPERTS)
    (folder / "config.json").write_text(json.dumps(settings | more))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_truncate, r"model\.safetensors: cannot be read \(.*\)\. Download or copy the model again"),
        (_forget_an_expert, r"files have 7 rows or tensors like 'model\.layers\.1\..*up_proj.*' for 8 experts"),
        (_count_more_experts, r"files have 8 rows or tensors like .* for 16 experts"),
    ],
)
def test_experts_in_files_with_damaged_files_raises_before_reading(tmp_path: Path, damage: Any, message: str):
    folder = saved(tmp_path)
    damage(folder)
    with pytest.raises(UserError, match=message):
        unread(folder)


def test_shard_experts_of_a_layer_without_tensors_raises(tmp_path: Path):
    _forget(saved(tmp_path), "model.layers.1.mlp.experts")
    model = unread(tmp_path)
    with pytest.raises(
        UserError, match=r"'model\.layers\.1\.mlp\.experts\..*' cannot be read from files \(the files lack it\)"
    ):
        shard_experts(model, ExpertGroups())


def read_by_ranks_with_files_of_their_own(folder: Path) -> str:
    """What this rank is told where the files of rank 1 are cut after the model was made."""
    rank = dist.get_rank()
    model = unread(folder / str(rank))
    if rank == 1:
        _truncate(folder / "1")
    with pytest.raises(UserError) as error:
        shard_experts(model, make_expert_groups(2))
    return str(error.value)


def test_shard_experts_with_an_unreadable_file_on_one_rank_raises_on_all(tmp_path: Path):
    for rank in range(2):
        saved(tmp_path / str(rank))
    first, second = run_distributed(read_by_ranks_with_files_of_their_own, 2, tmp_path)
    assert first == second
    assert str(tmp_path / "1" / "model.safetensors") in first


def test_experts_in_files_with_a_quantiser_raises(tmp_path: Path):
    from transformers import BitsAndBytesConfig

    folder = saved(tmp_path)
    with experts_in_files(), pytest.raises(UserError, match="files are quantised"):
        causal_lm(folder, quantization_config=BitsAndBytesConfig(load_in_8bit=True))


@pytest.mark.parametrize("load", [causal_lm, unread])
@pytest.mark.parametrize(
    "name", ["mlp.gate.weight", "self_attn.q_proj.weight", "model.embed_tokens.weight", "mlp.experts.3"]
)
def test_causal_lm_of_files_without_a_weight_raises(tmp_path: Path, load: Any, name: str):
    _forget(saved(tmp_path), name if name.startswith("model") else f"model.layers.1.{name}")
    with pytest.raises(UserError, match=r"lack \d weight|have 7 rows|cannot be read \(RuntimeError: .*ize"):
        load(tmp_path)


@pytest.mark.parametrize("load", [causal_lm, unread])
@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.bool])
def test_causal_lm_of_files_with_integers_raises(tmp_path: Path, load: Any, dtype: torch.dtype):
    (file,) = saved(tmp_path).glob("*.safetensors")
    tensors = load_file(file)
    name = "model.layers.0.mlp.experts.2.up_proj.weight"
    save_file(tensors | {name: tensors[name].to(dtype)}, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=f"{re.escape(name)} in .* has type"):
        load(tmp_path)
