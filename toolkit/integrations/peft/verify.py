"""Check a folder of PEFT adapters against its configuration, unmodified PEFT, and the ranks' record at saving.

`save_pretrained` writes the record next to the adapters, to `adapter_record.json`.
"""

from __future__ import annotations

import json
import re
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from toolkit.errors import UserError
from toolkit.experts.layer.stack import expert_stacks
from toolkit.experts.parallel.collectives import gather_objects, is_main
from toolkit.experts.parallel.ownership import ownership_of

WEIGHTS, CONFIG, RECORD = "adapter_model.safetensors", "adapter_config.json", "adapter_record.json"
OLDEST_LAYOUT = (0, 19, 1)
"""Earlier PEFT versions swap inputs and outputs of most stacked parameters."""
SAME = 1e-3
"""Relative difference of logits or norms in float32 that counts as rounding."""


# --- when adapters are saved ----------------------------------------------------------------------------------------


@torch.no_grad()
def describe_adapters(model: Any) -> dict[str, dict[str, Any]]:
    """Return for each adapter: norms of experts' rows, scalings, parameters that differ between ranks, and trained
    parameters of the base. Warns of the latter, as no adapter file has them.

    Parameters are named as if the adapter were loaded as `default`. A collective.
    """
    from peft.tuners.lora.layer import LoraLayer

    found: dict[str, dict[str, Any]] = {}
    num_experts = {
        id(parameter): stack.num_experts
        for stack in expert_stacks(model).values()
        for parameter in stack.parameters.values()
    }
    trained = _trained_of_base(model)
    if trained and is_main():
        warnings.warn(
            f"{len(trained)} parameter(s) of the base are trained, such as {trained[0]}, and are not saved with the "
            "adapters: write the full model with save_merged of toolkit.integrations.peft.merged_weights.",
            stacklevel=2,
        )
    for adapter in model.peft_config:
        norms, checks = {}, {}
        for name, parameter in model.named_parameters():
            plain = name.replace(f".{adapter}.", ".default.")
            if "lora_" not in name or f".{adapter}." not in name:
                continue
            if id(parameter) in num_experts:
                norms[plain] = _norms(parameter, num_experts[id(parameter)]).tolist()
            elif not isinstance(parameter, DTensor):
                checks[plain] = zlib.crc32(parameter.detach().cpu().contiguous().view(torch.uint8).numpy())
        layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, LoraLayer)]
        found[adapter] = {
            "norms": norms,
            "scaling": {name: layer.scaling[adapter] for name, layer in layers if adapter in layer.scaling},
            "differ": _differing(checks),
            "trained_of_base": trained,
        }
    return found


def _trained_of_base(model: Any) -> list[str]:
    """Return the names of trained parameters that PEFT's files do not have."""
    saved = ["lora_", ".modules_to_save.", ".trainable_tokens_"]
    if any(config.bias != "none" for config in model.peft_config.values()):
        saved.append(".bias")
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return [name for name in names if not any(part in name for part in saved)]


def _differing(checks: dict[str, int]) -> list[str]:
    """Return names with different values on ranks. A collective."""
    everyones = gather_objects(checks)
    return sorted(name for name, value in checks.items() if any(rank[name] != value for rank in everyones))


def _norms(parameter: Tensor, num_experts: int) -> Tensor:
    """Return norms (E,) of experts' rows, from their owners."""
    ownership = ownership_of(parameter)
    assert ownership is not None
    norms_E = parameter.new_zeros(num_experts)
    for row, expert in enumerate(ownership.row_ids):
        if ownership.owns[row]:
            norms_E[expert] = parameter[row].norm()
    if ownership.groups.ep_group is not None:
        dist.all_reduce(norms_E, group=ownership.groups.ep_group)
    return norms_E.double()


def write_records(records: dict[str, dict[str, Any]], folder: Path) -> None:
    """Write `records` next to each adapter, as PEFT saves it: `default` in `folder`, others below it."""
    for adapter, record in records.items():
        place = folder if adapter == "default" else folder / adapter
        (place / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


# --- when they are verified -----------------------------------------------------------------------------------------


@dataclass
class Verification:
    """Findings in a folder of adapters."""

    lines: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


@dataclass
class ExpertAdapter:
    """The adapter of one stacked parameter: A (E, r, in), B (E, out, r), in float32."""

    name: str
    a_ERI: Tensor
    b_EOR: Tensor
    scaling: float

    @property
    def norms_E(self) -> Tensor:
        """Norms of `scaling * B @ A` per expert, computed without the product."""
        of_a, of_b = self.a_ERI @ self.a_ERI.mT, self.b_EOR.mT @ self.b_EOR
        return (of_a * of_b).sum((1, 2)).clamp(min=0).sqrt() * abs(self.scaling)

    @property
    def unchanged(self) -> list[int]:
        """Experts whose B is zero, as PEFT initialises it."""
        return _where(~self.b_EOR.flatten(1).any(1))


Load = Callable[[str], nn.Module]
"""Loads a transformers model from a folder or Hub name."""


def verify_adapter(folder: Path, base: str | None = None, merged: Path | None = None, *, load: Load) -> Verification:
    """Compare the adapters in `folder` with their configuration, unmodified PEFT, and the record at saving.

    Args:
        folder: Folder written by `save_pretrained`.
        base: Folder or Hub name. Default: from the configuration.
        merged: Folder of the base with these adapters merged, to be checked.
        load: Loads base and merged, in float32: `toolkit.integrations.transformers.causal_lm`.

    Raises:
        UserError: The base model is not known.
    """
    found = Verification()
    settings: dict[str, Any] = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    base = base or settings.get("base_model_name_or_path")
    if not base:
        raise UserError(f"base: {folder / CONFIG} names no base model. Give its folder or Hub name.")
    _check_version(settings, found)
    model = _load(folder, base, load, found)
    if model is None:
        return found
    adapters = list(_expert_adapters(model))
    for adapter in adapters:
        _check_rows(adapter, found)
    if adapters and all(len(adapter.unchanged) == len(adapter.b_EOR) for adapter in adapters):
        found.faults.append("no adapter of an expert was ever changed: they were frozen, or not in the optimizer")
    _check_record(folder, model, found)
    if not found.faults:
        _check_logits(model, base, merged, load, found)
    return found


def _check_version(settings: dict[str, Any], found: Verification) -> None:
    version = settings.get("peft_version") or "of an unknown version"
    numbers = tuple(map(int, re.findall(r"\d+", version)[:3]))
    found.lines.append(f"written by PEFT {version}")
    if settings.get("target_parameters") and numbers < OLDEST_LAYOUT:
        found.faults.append(
            f"written by PEFT {version}, which kept inputs and outputs of stacked experts the other way round than "
            f"{'.'.join(map(str, OLDEST_LAYOUT))} and later do: load and save it with the version that wrote it"
        )


def _load(folder: Path, base: str, load: Load, found: Verification) -> Any:
    """Load the base and the adapters by unmodified PEFT; None if they do not fit."""
    from peft import PeftConfig, get_peft_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's warnings are checked below
        try:
            model = get_peft_model(load(base), PeftConfig.from_pretrained(str(folder)))
            loaded = model.load_adapter(str(folder), "default")
        except (ValueError, RuntimeError, KeyError) as error:
            lines = [line.strip() for line in str(error).splitlines()]
            reason = next((line for line in lines if "size mismatch" in line), " ".join(lines)[:300])
            found.faults.append(f"stock PEFT cannot load it: {reason}")
            return None
    for kind, names in (("lacks", loaded.missing_keys), ("holds, for no layer of the base,", loaded.unexpected_keys)):
        if names:
            found.faults.append(f"{WEIGHTS} {kind} {len(names)} tensor(s), such as {sorted(names)[0]}")
    if found.faults and loaded.missing_keys:
        return None
    found.lines.append(f"loaded by unmodified PEFT into {type(model.get_base_model()).__name__}")
    return model.eval()


def _expert_adapters(model: nn.Module) -> Iterator[ExpertAdapter]:
    from peft.tuners.lora.layer import ParamWrapper

    modules: dict[str, Any] = dict(model.named_modules())
    for name, wrapper in modules.items():
        if isinstance(wrapper, ParamWrapper) and wrapper.num_experts > 1:
            a, b = (wrapper.get_parameter(f"lora_{matrix}.default.weight").detach().float() for matrix in "AB")
            experts = wrapper.num_experts
            place = re.sub(r"^base_model\.model\.|\.base_layer", "", name)
            yield ExpertAdapter(
                f"{place}.{wrapper.parameter_name}",
                a.view(experts, -1, a.shape[1]),
                b.view(len(b), -1, experts).permute(2, 0, 1),
                float(wrapper.scaling["default"]),
            )


def _check_rows(adapter: ExpertAdapter, found: Verification) -> None:
    experts = len(adapter.a_ERI)
    a_EN = adapter.a_ERI.flatten(1)
    broken = _where(~(a_EN.isfinite().all(1) & adapter.b_EOR.flatten(1).isfinite().all(1)))
    if broken:
        found.faults.append(f"{adapter.name}: numbers that are not finite in {_named(broken)}")
        return
    if empty := _where(~a_EN.any(1)):
        found.faults.append(f"{adapter.name}: A is zero, as no training makes it, in {_named(empty)}: rows were lost")
    twins = [expert for expert in range(experts) if a_EN[expert].any() and (a_EN[:expert] == a_EN[expert]).all(1).any()]
    if twins:
        found.faults.append(f"{adapter.name}: A is bitwise equal to A of an earlier expert in {_named(twins)}")
    norms_E, unchanged = adapter.norms_E, adapter.unchanged
    found.lines.append(
        f"{adapter.name}: {experts} experts, norms from {norms_E.min():.3g} to {norms_E.max():.3g}"
        + (f", never changed: {_named(unchanged)}" if unchanged else "")
    )


def _check_record(folder: Path, model: Any, found: Verification) -> None:
    """Compare with the ranks' record, which `save_pretrained` of this toolkit writes next to the adapters."""
    try:
        known = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found.lines.append(f"no {RECORD}: it was not saved by this toolkit, so order and scaling are not compared")
        return
    for name, scaling in known["scaling"].items():
        now = model.get_submodule(name).scaling["default"]
        if abs(now - scaling) > SAME * abs(scaling):
            found.faults.append(f"{name}: scaling was {scaling:g} in training and is {now:g} by {CONFIG}")
            break
    for name, norms in known["norms"].items():
        then_E, now_E = torch.tensor(norms, dtype=torch.float64), _norms_of(model, name)
        if now_E is None or len(now_E) != len(then_E):
            found.faults.append(f"{name}: was trained and is not there")
        elif differing := _where((then_E - now_E).abs() > SAME * then_E.max()):
            reordered = torch.allclose(then_E.sort().values, now_E.sort().values, rtol=SAME)
            what = "experts are in another order than" if reordered else "norms are not those of what"
            found.faults.append(f"{name}: {what} the ranks held, in {_named(differing)}")
    if names := known["trained_of_base"]:
        found.faults.append(
            f"{len(names)} parameter(s) of the base were trained with the adapters, such as {names[0]}, and are not in "
            "this folder: use the folder that save_merged writes"
        )
    if known["differ"]:
        names = known["differ"]
        found.faults.append(
            f"ranks held different values of {len(names)} replicated adapter(s), such as {names[0]}: "
            "each rank trained its own"
        )


def _norms_of(model: nn.Module, name: str) -> Tensor | None:
    """Return norms (E,) of a matrix in PEFT's layout."""
    place, _, matrix = name.rpartition(".lora_")
    try:
        experts, weight = int(model.get_submodule(place).num_experts), model.get_parameter(name)  # type: ignore[arg-type]
    except AttributeError:
        return None
    rows = weight.view(experts, -1) if matrix.startswith("A") else weight.view(-1, experts).mT
    return rows.detach().double().norm(dim=1)


@torch.no_grad()
def _check_logits(model: Any, base: str, merged: Path | None, load: Load, found: Verification) -> None:
    ids = torch.randint(model.config.vocab_size, (2, 16), generator=torch.Generator().manual_seed(0))
    unmerged = model(input_ids=ids).logits
    with model.disable_adapter():
        without = model(input_ids=ids).logits
    effect = _relative(unmerged, without)
    found.lines.append(f"the adapters change logits by {effect:.2g} of their norm")
    whole = model.merge_and_unload()
    if (off := _relative(whole(input_ids=ids).logits, unmerged)) > SAME:
        found.faults.append(f"merged by PEFT, logits differ from unmerged ones by {off:.2g} of their norm")
    else:
        found.lines.append(f"merged and unmerged logits agree within {off:.1g}")
    if merged is None:
        return
    given = load(str(merged))
    off = _relative(given(input_ids=ids).logits, unmerged)
    if off <= min(SAME, effect / 2):
        found.lines.append(f"{merged} gives these logits within {off:.1g}")
        return
    plain, wanted = load(base).state_dict(), whole.state_dict()
    dropped = [
        name
        for name, value in given.state_dict().items()
        if torch.equal(value, plain[name]) and not torch.equal(value, wanted[name])
    ]
    kept = f": as in the base are {len(dropped)} tensor(s), such as {dropped[0]}" if dropped else ""
    found.faults.append(f"{merged} is not the base with these adapters: logits differ by {off:.2g} of their norm{kept}")


def _relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def _where(mask_E: Tensor) -> list[int]:
    return [int(expert) for expert in mask_E.nonzero().flatten()]


def _named(experts: list[int]) -> str:
    shown = ", ".join(map(str, experts[:8])) + (f" and {len(experts) - 8} more" if len(experts) > 8 else "")
    return f"expert(s) {shown}"
