"""Every mixture that transformers ships trains with its experts on two processes as on one, or is refused in one line.

Two clipped steps of SGD with momentum, in float64 where the family computes in it, with experts moved between them, and
saved as ordinary weights. What came of each family is the table of `docs/experts/transformers_families.md`: `make
families` tries all and writes it anew, the suite tries a tenth of the families that have the same row.
"""

from __future__ import annotations

import re
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.integrations.transformers.mixtures import EXPERTS, VOCAB, build, computes_in_float64, families, outputs
from tests.support.equality import in_float64, relative_difference
from tests.support.helpers import ROOT, run_distributed
from toolkit.errors import UserError
from toolkit.experts.layer.stack import rows_of
from toolkit.experts.parallel.groups import ExpertGroups
from toolkit.experts.parallel.ownership import ownership_of
from toolkit.experts.placement.placement import ExpertPlacement
from toolkit.experts.sharding.shard import shard_experts
from toolkit.integrations.transformers import experts_in_files, place_experts, save_pretrained, watch_routers

TABLE = ROOT / "docs" / "experts" / "transformers_families.md"
PLACED, MOVED = ExpertPlacement(((3, 0), (2, 1))), ExpertPlacement(((1, 3), (0, 2)))
COLUMNS = ("train", "move", "save", "load", "adapt", "export")
TOLERANCE = 1e-4
"""Relative, of each tensor. What is computed in float32 on purpose rounds; a wrong row differs by a tenth or more."""


def tokens(step: int) -> Tensor:
    """int64 (4, 6): the global batch of a step."""
    return torch.randint(3, VOCAB, (4, 6), generator=torch.Generator().manual_seed(100 + step))


def difference(found: dict[str, Tensor | None], expected: dict[str, Tensor | None], held: dict[str, Any]) -> float:
    """The largest relative difference of any tensor, of the rows that this rank has.

    Tensors that are much smaller than others are compared with these: where a gradient is 0, rounding is all there is.
    """
    small = 1e-2 * max(value.norm().item() for value in expected.values() if value is not None)
    largest = 0.0
    for name, value in found.items():
        other = torch.zeros_like(held[name]) if expected[name] is None else expected[name]
        value = torch.zeros_like(held[name]) if value is None else value
        if expected[name] is not None and ownership_of(held[name]) is not None:
            other = other.view(EXPERTS, *value.shape[1:])[list(ownership_of(held[name]).row_ids)]
        relative = ((value - other).norm() / other.norm().clamp(min=small)).item()
        largest = max(largest, relative if relative == relative else float("inf"))
    return largest


def step(model: Any, optimizer: Any, clip: Any, ids: Tensor) -> dict[str, Tensor | None]:
    """One step; returns the gradients before they are clipped."""
    outputs(model, ids).square().mean().backward()
    inner = getattr(model, "module", model)
    grads = {name: None if p.grad is None else p.grad.clone() for name, p in inner.named_parameters()}
    clip(model.parameters(), 0.3)
    optimizer.step()
    optimizer.zero_grad()
    return grads


def weights(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def compare(family: str, folder: Path, *, find_unused: bool) -> dict[str, float]:
    """How far a family on two processes is from one, in training, moving and saving."""
    from accelerate import Accelerator, DistributedDataParallelKwargs

    from toolkit.integrations.accelerate.expert_parallel import ExpertParallel

    handlers = [DistributedDataParallelKwargs(find_unused_parameters=True)] if find_unused else []
    accelerator, rank = Accelerator(cpu=True, kwargs_handlers=handlers), dist.get_rank()
    alone, model = build(family), build(family)
    its_optimizer = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    experts = ExpertParallel(accelerator, ep_size=2, placement=lambda *_: PLACED)
    wrapped, optimizer = experts.prepare(model, optimizer)
    held = dict(model.named_parameters())
    largest = []
    for number in range(2):
        ids = tokens(number)
        if number:
            place_experts(model, MOVED, optimizer)
        grads = step(wrapped, optimizer, accelerator.clip_grad_norm_, ids[2 * rank : 2 * rank + 2])
        expected = step(alone, its_optimizer, nn.utils.clip_grad_norm_, ids)
        largest.append(
            max(difference(grads, expected, held), difference(weights(model), weights(alone), held)),
        )
    inner = accelerator.unwrap_model(wrapped)
    inner.save_pretrained(folder / family, is_main_process=accelerator.is_main_process, max_shard_size="1KB")
    of_files = 0.0
    if rank == 0:
        alone.save_pretrained(folder / "alone")
        saved = {
            key: value for file in (folder / family).glob("*.safetensors") for key, value in load_file(file).items()
        }
        known = load_file(folder / "alone/model.safetensors")
        assert saved.keys() == known.keys()
        of_files = max(relative_difference(saved[name], known[name]) for name in known)
    dist.barrier()
    of_load = compare_loading(type(alone), folder / "alone", experts.groups)
    return {"train": largest[0], "move": largest[1], "save": of_files, "load": of_load}


def compare_loading(kind: Any, folder: Path, groups: ExpertGroups) -> float:
    """How far a model whose ranks read their own experts is from one that was read whole, with an empty slot.

    Of three slots two are read at a time.
    """
    whole = kind.from_pretrained(folder)
    with experts_in_files():
        part = kind.from_pretrained(folder, experts_implementation="eager")
    assert sum(p.untyped_storage().nbytes() for p in part.parameters()) < sum(p.nbytes for p in whole.parameters())
    with mock.patch.object(sys.modules[experts_in_files.__module__], "experts_at_a_time", return_value=2):
        shard_experts(part, groups, placement=lambda *_: MOVED, spare_slots=1)
    expected, largest = dict(whole.named_parameters()) | dict(whole.named_buffers()), 0.0
    for name, value in (*part.named_parameters(), *part.named_buffers()):
        other = expected.pop(name)
        if (ownership := ownership_of(value)) is not None:
            other = rows_of(other.view(EXPERTS, *value.shape[1:]), ownership.row_ids)
        assert value.dtype == other.dtype
        assert value.requires_grad == other.requires_grad
        largest = max(largest, (value - other).abs().max().item() if value.numel() else 0.0)
    assert not expected
    return largest


def with_adapters(family: str) -> Any:
    """With random low-rank adapters of all stacked matrices of experts."""
    from peft import LoraConfig, get_peft_model

    model = build(family)
    tables = [
        f"{name}.{key}"
        for name, module in model.named_modules()
        if name.endswith((".experts", ".experts.mlp"))
        for key, parameter in module.named_parameters(recurse=False)
        if "bias" not in key and parameter.ndim > 1
    ]
    torch.manual_seed(1)
    return get_peft_model(
        model, LoraConfig(r=2, lora_alpha=8, target_modules=[], target_parameters=tables, init_lora_weights=False)
    )


def by_expert(model: nn.Module, *, grads: bool = False) -> dict[str, Tensor]:
    """Adapters' rows, or those of their gradients, as PEFT lays them out or as ours, which has those of this rank."""
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            continue
        value = (torch.zeros_like(parameter) if parameter.grad is None else parameter.grad) if grads else parameter
        value, ownership = value.detach(), ownership_of(parameter)
        if ownership is not None:
            rows = dict(zip(ownership.row_ids, value, strict=True))
        elif "lora_A" in name:
            rows = dict(enumerate(value.view(EXPERTS, -1, value.shape[1])))
        else:
            rows = {expert: value[:, expert::EXPERTS] for expert in range(EXPERTS)}
        found |= {f"{name} of expert {expert}": row.clone() for expert, row in rows.items()}
    return found


def apart(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference of any row that was found, relative to the largest row."""
    largest = max(row.norm().item() for row in expected.values())
    return max((row - expected[name]).norm().item() for name, row in found.items()) / largest


def compare_adapters(family: str, folder: Path) -> dict[str, float]:
    """How far adapters of experts on two processes are from stock PEFT's on one, after a step and in what is saved."""
    from accelerate import Accelerator
    from peft import PeftModel

    from toolkit.integrations.accelerate.expert_parallel import ExpertParallel

    alone, model = with_adapters(family), with_adapters(family)
    optimizers: list[Any] = [
        torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=0.1) for each in (alone, model)
    ]
    experts = ExpertParallel(Accelerator(cpu=True), ep_size=2, placement=lambda *_: PLACED)
    wrapped, optimizers[1] = experts.prepare(model, optimizers[1])
    ids, rank = tokens(0), dist.get_rank()
    for each, part in ((alone, ids), (wrapped, ids[2 * rank : 2 * rank + 2])):
        outputs(each, part).square().mean().backward()
    differences = [apart(by_expert(model, grads=True), by_expert(alone, grads=True))]
    for optimizer in optimizers:
        optimizer.step()
    differences.append(apart(by_expert(model), by_expert(alone)))
    places = folder / f"{family} adapter", folder / f"{family} of stock PEFT"
    save_pretrained(wrapped, places[0])
    if rank == 0:
        alone.save_pretrained(places[1])
    dist.barrier()
    exported, its_own = (by_expert(PeftModel.from_pretrained(build(family), place)) for place in places)
    if apart(by_expert(alone), its_own) > 0:  # nothing that is saved could be read
        return {"adapt": max(differences)}
    return {"adapt": max(differences), "export": apart(by_expert(model), exported)}


def judge(family: str, folder: Path) -> dict[str, Any]:
    """How far the family is from one process, and what a user should know of it."""
    refusal, found = attempt(family, folder, find_unused=False)
    notes = []
    if "find_unused_parameters=True" in refusal:
        notes.append("needs `find_unused_parameters=True`")
        refusal, found = attempt(family, folder, find_unused=True)
    if refusal:
        assert "no experts that can be sharded" in refusal, refusal
        return {"family": family, "note": "not supported"}
    if not router_is_watched(family):
        notes.append("no `RouterPenalty`")
    refusal, adapters = attempt_adapters(family, folder)
    found |= adapters
    if refusal:
        assert "no experts that can be sharded" in refusal or "are not supported" in refusal, refusal
        notes.append("no adapters")
    elif "export" not in adapters:
        notes.append("unmodified PEFT cannot read its own adapters")
    return {"family": family, "note": ", ".join(notes), **found}


def attempt(family: str, folder: Path, *, find_unused: bool) -> tuple[str, dict[str, float]]:
    """Why it was refused, or nothing and the differences."""
    try:
        return "", compare(family, folder, find_unused=find_unused)
    except UserError as error:
        return str(error), {}


def attempt_adapters(family: str, folder: Path) -> tuple[str, dict[str, float]]:
    """Why adapters of its experts were refused, or nothing and the differences."""
    try:
        return "", compare_adapters(family, folder)
    except UserError as error:
        return str(error), {}


def router_is_watched(family: str) -> bool:
    model = build(family)
    try:
        watches = watch_routers(model)
        outputs(model, tokens(0))
    except UserError:
        return False
    return any(watch.routing is not None for watch in watches)


def judge_all(names: list[str], folder: Path) -> list[dict[str, Any]]:
    from accelerate.state import AcceleratorState
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    found = []
    for name in names:
        AcceleratorState._reset_state()
        with in_float64() if computes_in_float64(name, tokens(0)) else nullcontext():
            try:
                found.append(judge(name, folder))
            except Exception as error:
                raise AssertionError(f"{name}: {error}") from error
    return found


def results(names: list[str], folder: Path) -> list[dict[str, Any]]:
    """Of each family: those of `COLUMNS` are relative differences, missing where it is refused."""
    first, second = run_distributed(judge_all, 2, names, folder, timeout_s=600)
    for here, there in zip(first, second, strict=True):
        assert here["note"] == there["note"], f"{here['family']}: ranks disagree"
        here.update({step: max(here[step], there[step]) for step in COLUMNS if step in here})
    return first


def lines(found: list[dict[str, Any]]) -> list[str]:
    """The rows of the table."""
    rows = []
    for each in found:
        name = each["family"]
        cells = [f"`{name}`", *(_cell(step, each.get(step)) for step in COLUMNS), each["note"]]
        rows.append(f"| {' | '.join(cells)} |".replace("|  |", "| |"))
    return rows


def _cell(step: str, difference: float | None) -> str:
    limit = 0.0 if step in ("load", "export") else TOLERANCE
    return "no" if difference is None else "yes" if difference <= limit else "WRONG"


def page(found: list[dict[str, Any]]) -> str:
    rows, refused = "\n".join(lines(found)), sum("train" not in each for each in found)
    return f"""# MoE families of transformers

`make families` wrote this table with transformers {transformers.__version__}, and
`tests/integrations/transformers/test_mixtures.py` compares it with the installed release. Of {len(found)} families
with a number of experts and a vocabulary, {len(found) - refused} train under `ExpertParallel`. Models are small and
have random weights.

- **train**: gradients and weights after a step on two processes equal one process.
- **move**: they are equal after experts and optimizer rows migrated.
- **save**: `save_pretrained` of `toolkit.integrations.transformers` writes equal files.
- **load**: with `experts_in_files()` each rank reads only its own experts, bitwise identical to a full load.
- **adapt**: PEFT's adapters of experts train as in unmodified PEFT.
- **export**: unmodified PEFT loads the saved adapters bitwise identically.
- `find_unused_parameters=True`: some parameters have no gradient. Use
  `Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])`.
- no `RouterPenalty`: the router does not return (logits, weights, ids) next to the experts. Use the model's auxiliary
  loss.
- no adapters: adapters of experts raise an error; adapters of attention work.
- not supported: `ExpertParallel` raises an error. Use `accelerator.prepare`.

| family | train | move | save | load | adapt | export | note |
|---|---|---|---|---|---|---|---|
{rows}
"""


def test_families_train_move_and_save_as_on_one_process_and_the_table_says_so(tmp_path: Path):
    table, installed = TABLE.read_text(), set(families())
    rows = dict(re.findall(r"^\| `(\S+)` (\|.*)$", table, re.MULTILINE))
    if f"with transformers {transformers.__version__}," in table:
        assert rows.keys() == installed
    alike: dict[str, list[str]] = {}
    for name, cells in rows.items():
        alike.setdefault(cells, []).append(name)
    for line in lines(
        results([name for names in alike.values() for name in names[::10] if name in installed], tmp_path)
    ):
        assert "WRONG" not in line
        assert line in table, f"transformers {transformers.__version__} differs from {TABLE.name}: run `make families`"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        TABLE.write_text(page(results(sorted(families()), Path(folder))))
