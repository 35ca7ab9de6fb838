"""Every MoE family of transformers trains on two processes as on one, or raises an error.

Each runs two clipped steps of SGD with momentum, in float64 if the family supports it, with a migration in between, and
is saved. `make families` runs all families and writes `docs/experts/transformers_families.md`; the suite runs a tenth
of the families with equal results.
"""

import re
import sys
import tempfile
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.state import AcceleratorState
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.utils import logging

from benchmarks.support.families import TINY_EXPERTS, build, moe_families, outputs, supports_float64, tokens
from benchmarks.support.precision import in_float64, relative_difference
from benchmarks.support.processes import ROOT, run_distributed
from tests.integrations.peft.models import add_adapters, rows
from toolkit.errors import UserError
from toolkit.experts.layer.stack import rows_of
from toolkit.experts.parallel.groups import ExpertGroups
from toolkit.experts.parallel.ownership import ownership_of
from toolkit.experts.placement.placement import ExpertPlacement
from toolkit.experts.sharding.shard import shard_experts
from toolkit.integrations.accelerate.expert_parallel import ExpertParallel
from toolkit.integrations.transformers import experts_in_files, place_experts, save_pretrained, watch_routers

TABLE = ROOT / "docs" / "experts" / "transformers_families.md"
PLACED, MOVED = ExpertPlacement(((3, 0), (2, 1))), ExpertPlacement(((1, 3), (0, 2)))
COLUMNS = ("train", "move", "save", "load", "adapt", "export")
TOLERANCE = 1e-4
"""Relative, per tensor. Families that compute in float32 round; a wrong row differs by a tenth or more."""


def batch(step: int) -> Tensor:
    return tokens(step, 4)[:, :6]


def difference(found: dict[str, Tensor | None], expected: dict[str, Tensor | None], held: dict[str, Any]) -> float:
    """Return the largest relative difference of any tensor, over the rows that this rank owns.

    Norms are clamped to 1 % of the largest norm, because gradients that should be 0 are rounding errors.
    """
    small = 1e-2 * max(value.norm().item() for value in expected.values() if value is not None)
    largest = 0.0
    for name, value in found.items():
        other = torch.zeros_like(held[name]) if expected[name] is None else expected[name]
        value = torch.zeros_like(held[name]) if value is None else value
        if expected[name] is not None and ownership_of(held[name]) is not None:
            other = other.view(TINY_EXPERTS, *value.shape[1:])[list(ownership_of(held[name]).row_ids)]
        relative = ((value - other).norm() / other.norm().clamp(min=small)).item()
        largest = max(largest, relative if relative == relative else float("inf"))
    return largest


def step(model: Any, optimizer: Any, clip: Any, ids: Tensor) -> dict[str, Tensor | None]:
    """Run one step, and return the gradients before clipping."""
    outputs(model, ids).square().mean().backward()
    inner = getattr(model, "module", model)
    grads = {name: None if p.grad is None else p.grad.clone() for name, p in inner.named_parameters()}
    clip(model.parameters(), 0.3)
    optimizer.step()
    optimizer.zero_grad()
    return grads


def weights(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def compare(family: str, folder: Path, *, find_unused: bool = False, frozen: str = "no parameter") -> dict[str, float]:
    """Return the difference between two processes and one in training, migration, saving and loading."""
    handlers = [DistributedDataParallelKwargs(find_unused_parameters=True)] if find_unused else []
    accelerator, rank = Accelerator(cpu=True, kwargs_handlers=handlers), dist.get_rank()
    reference, model = build(family), build(family)
    freeze(frozen, reference, model)
    reference_optimizer, optimizer = (
        torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (reference, model)
    )
    experts = ExpertParallel(accelerator, ep_size=2, placement=lambda *_: PLACED)
    wrapped, optimizer = experts.prepare(model, optimizer)
    held, largest = dict(model.named_parameters()), []
    for number in range(2):
        if number:
            place_experts(model, MOVED, optimizer)
        grads = step(wrapped, optimizer, accelerator.clip_grad_norm_, batch(number)[2 * rank : 2 * rank + 2])
        expected = step(reference, reference_optimizer, nn.utils.clip_grad_norm_, batch(number))
        largest.append(max(difference(grads, expected, held), difference(weights(model), weights(reference), held)))
    inner = accelerator.unwrap_model(wrapped)
    inner.save_pretrained(folder / family, is_main_process=accelerator.is_main_process, max_shard_size="1KB")
    saving = 0.0
    if rank == 0:
        reference.save_pretrained(folder / "reference")
        files = (folder / family).glob("*.safetensors")
        saved = {key: value for file in files for key, value in load_file(file).items()}
        known = load_file(folder / "reference/model.safetensors")
        assert saved.keys() == known.keys()
        saving = max(relative_difference(saved[name], known[name]) for name in known)
    dist.barrier()
    loading = compare_loading(type(reference), folder / "reference", experts.groups, frozen)
    return {"train": largest[0], "move": largest[1], "save": saving, "load": loading}


def freeze(part: str, *models: nn.Module) -> None:
    """Freeze parameters whose name has this part."""
    for name, parameter in (pair for model in models for pair in model.named_parameters()):
        if part in name:
            parameter.requires_grad_(False)


def compare_loading(kind: Any, folder: Path, groups: ExpertGroups, frozen: str) -> float:
    """Return the difference between lazy and full loading, with a spare slot, two of three slots at a time."""
    full = kind.from_pretrained(folder)
    with experts_in_files():
        lazy = kind.from_pretrained(folder, experts_implementation="eager")
    assert sum(p.untyped_storage().nbytes() for p in lazy.parameters()) < sum(p.nbytes for p in full.parameters())
    with mock.patch.object(sys.modules[experts_in_files.__module__], "experts_at_a_time", return_value=2):
        freeze(frozen, full, lazy)
        shard_experts(lazy, groups, placement=lambda *_: MOVED, spare_slots=1)
    expected, largest = dict(full.named_parameters()) | dict(full.named_buffers()), 0.0
    for name, value in (*lazy.named_parameters(), *lazy.named_buffers()):
        other = expected.pop(name)
        if (ownership := ownership_of(value)) is not None:
            other = rows_of(other.view(TINY_EXPERTS, *value.shape[1:]), ownership.row_ids)
        assert value.dtype == other.dtype
        assert value.requires_grad == other.requires_grad
        largest = max(largest, (value - other).abs().max().item() if value.numel() else 0.0)
    assert not expected
    return largest


def with_adapters(family: str) -> Any:
    """Return a model with random adapters of all matrices of experts."""
    model = build(family)
    tables = [
        f"{name}.{key}"
        for name, module in model.named_modules()
        if name.endswith((".experts", ".experts.mlp"))
        for key, parameter in module.named_parameters(recurse=False)
        if "bias" not in key and parameter.ndim > 1
    ]
    return add_adapters(model, r=2, lora_alpha=8, target_modules=[], target_parameters=tables, init_lora_weights=False)


def adapter_rows(model: nn.Module, *, grads: bool = False) -> dict[str, Tensor]:
    found = rows(model, grads=grads, experts=TINY_EXPERTS)
    return {name: row for name, row in found.items() if "lora_" in name}


def row_difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest difference of any row in `found`, relative to the largest row."""
    largest = max(row.norm().item() for row in expected.values())
    return max((row - expected[name]).norm().item() for name, row in found.items()) / largest


def compare_adapters(family: str, folder: Path) -> dict[str, float]:
    """Return the difference between adapters on two processes and unmodified PEFT on one, after a step and saved."""
    reference, model = with_adapters(family), with_adapters(family)
    optimizers: list[Any] = [
        torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=0.1) for each in (reference, model)
    ]
    experts = ExpertParallel(Accelerator(cpu=True), ep_size=2, placement=lambda *_: PLACED)
    wrapped, optimizers[1] = experts.prepare(model, optimizers[1])
    ids, rank = batch(0), dist.get_rank()
    for each, part in ((reference, ids), (wrapped, ids[2 * rank : 2 * rank + 2])):
        outputs(each, part).square().mean().backward()
    differences = [row_difference(adapter_rows(model, grads=True), adapter_rows(reference, grads=True))]
    for optimizer in optimizers:
        optimizer.step()
    differences.append(row_difference(adapter_rows(model), adapter_rows(reference)))
    places = folder / f"{family} adapter", folder / f"{family} unmodified PEFT"
    save_pretrained(wrapped, places[0])
    if rank == 0:
        reference.save_pretrained(places[1])
    dist.barrier()
    exported, unmodified = (adapter_rows(PeftModel.from_pretrained(build(family), place)) for place in places)
    if row_difference(adapter_rows(reference), unmodified) > 0:  # unmodified PEFT cannot read its own adapters
        return {"adapt": max(differences)}
    return {"adapt": max(differences), "export": row_difference(adapter_rows(model), exported)}


def judge(family: str, folder: Path) -> dict[str, Any]:
    """Return the differences of a family by column, and its note."""
    error, found = attempt(compare, family, folder)
    notes = []
    if "find_unused_parameters=True" in error:
        notes.append("needs `find_unused_parameters=True`")
        error, found = attempt(partial(compare, find_unused=True), family, folder)
    if shared := re.search(r"share '(\w+)\.\w+'", error):
        notes.append(f"needs a frozen `{shared[1]}`")
        error, found = attempt(partial(compare, frozen=shared[1]), family, folder)
    if error:
        assert "no experts that can be sharded" in error, error
        return {"family": family, "note": "not supported"}
    if not supports_router_penalty(family):
        notes.append("no `RouterPenalty`")
    error, adapters = attempt(compare_adapters, family, folder)
    if error:
        assert "no experts that can be sharded" in error or "are not supported" in error, error
        notes.append("no adapters")
    elif "export" not in adapters:
        notes.append("unmodified PEFT cannot read its own adapters")
    return {"family": family, "note": ", ".join(notes), **found, **adapters}


def attempt(comparison: Any, family: str, folder: Path) -> tuple[str, dict[str, float]]:
    """Return the message of a UserError, and the differences."""
    try:
        return "", comparison(family, folder)
    except UserError as error:
        return str(error), {}


def supports_router_penalty(family: str) -> bool:
    model = build(family)
    try:
        watches = watch_routers(model)
        outputs(model, batch(0))
    except UserError:
        return False
    return any(watch.routing is not None for watch in watches)


def judge_all(names: list[str], folder: Path) -> list[dict[str, Any]]:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    found = []
    for name in names:
        AcceleratorState._reset_state()
        with in_float64() if supports_float64(name, batch(0)) else nullcontext():
            try:
                found.append(judge(name, folder))
            except Exception as error:
                raise AssertionError(f"{name}: {error}") from error
    return found


def results(names: list[str], folder: Path) -> list[dict[str, Any]]:
    """Return the family, note and differences by column of each family; unsupported columns are missing."""
    first, second = run_distributed(judge_all, 2, names, folder, timeout_s=600)
    for result, other in zip(first, second, strict=True):
        assert result["note"] == other["note"], f"{result['family']}: ranks differ"
        result.update({column: max(result[column], other[column]) for column in COLUMNS if column in result})
    return first


def row(result: dict[str, Any]) -> str:
    def cell(column: str) -> str:
        limit = 0.0 if column in ("load", "export") else TOLERANCE
        return "no" if column not in result else "yes" if result[column] <= limit else "WRONG"

    cells = [f"`{result['family']}`", *map(cell, COLUMNS), result["note"]]
    return f"| {' | '.join(cells)} |".replace("|  |", "| |")


def page(found: list[dict[str, Any]]) -> str:
    rows, unsupported = "\n".join(map(row, found)), sum("train" not in each for each in found)
    return f"""# MoE families of transformers

`make families` wrote this table with transformers {transformers.__version__}, and
`tests/integrations/transformers/test_families.py` compares it with the installed release. Of {len(found)} families
with a number of experts and a vocabulary, {len(found) - unsupported} train under `ExpertParallel`. Models are small and
have random weights.

- **train**: gradients and weights after a step on two processes equal one process.
- **move**: they are equal after experts and optimizer rows migrated.
- **save**: `save_pretrained` of `toolkit.integrations.transformers` writes equal files.
- **load**: with `experts_in_files()` each rank reads only its own experts, bitwise identical to a full load.
- **adapt**: PEFT's adapters of experts train as in unmodified PEFT.
- **export**: unmodified PEFT loads the saved adapters bitwise identically.
- `find_unused_parameters=True`: some parameters have no gradient. Use
  `Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])`.
- a frozen parameter: all experts of a layer share it. Use `requires_grad_(False)`.
- no `RouterPenalty`: the router does not return (logits, weights, ids) next to the experts. Use the model's auxiliary
  loss.
- no adapters: adapters of experts raise an error; adapters of attention work.
- not supported: `ExpertParallel` raises an error. Use `accelerator.prepare`.

| family | train | move | save | load | adapt | export | note |
|---|---|---|---|---|---|---|---|
{rows}
"""


def test_moe_families_on_two_processes_match_documented_table(tmp_path: Path):
    table, installed = TABLE.read_text(), set(moe_families())
    cells_of = dict(re.findall(r"^\| `(\S+)` (\|.*)$", table, re.MULTILINE))
    if f"with transformers {transformers.__version__}," in table:
        assert cells_of.keys() == installed
    alike: dict[str, list[str]] = {}
    for name, cells in cells_of.items():
        alike.setdefault(cells, []).append(name)
    tried = [name for names in alike.values() for name in names[::10] if name in installed]
    for line in map(row, results(tried, tmp_path)):
        assert "WRONG" not in line
        assert line in table, f"transformers {transformers.__version__} differs from {TABLE.name}: run `make families`"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        TABLE.write_text(page(results(sorted(moe_families()), Path(folder))))
