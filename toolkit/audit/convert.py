"""Conversion of expert adapters between the layouts of PEFT, vLLM and SGLang, and to a merged model."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from toolkit.audit.checkpoint import read_json
from toolkit.audit.experts import Matrix, count_experts, find_matrices, value_of
from toolkit.audit.merged_model import LoRA, MergedModel
from toolkit.audit.tensors import AdapterFiles, named_base, read_settings
from toolkit.errors import UserError
from toolkit.experts.layer.rows_in_files import as_in_files
from toolkit.integrations.peft import layouts
from toolkit.integrations.transformers.compat import names_of_separate_experts
from toolkit.progress_bar import progress

CONVERTED = {
    "auto_mapping",
    "base_model_name_or_path",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "lora_B_layout",
    "lora_alpha",
    "lora_dropout",
    "megatron_core",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "r",
    "rank_pattern",
    "revision",
    "runtime_config",
    "target_modules",
    "target_parameters",
    "task_type",
    "use_rslora",
}
"""Settings of PEFT 0.21 that name, place, scale or start adapters. Others have to be off."""
OFF: dict[str, Any] = {"bias": ("none",), "init_lora_weights": (True, "gaussian", "eva")}
"""Further values that change neither the base model nor the output of adapters."""
VLLM_STACKED = {
    "gpt_oss",
    "intern_s2_preview",
    "interns1_pro",
    "interns2_mobius",
    "qwen3_5_moe",
    "qwen3_omni_moe",
    "qwen3_vl_moe",
}
"""Families whose adapters vLLM 0.33 reads in PEFT's layout (`is_3d_moe_weight`); it reads others by expert."""
TINKER = {"gate_up_proj": ["w1", "w3"], "down_proj": ["w2"]}
"""Tinker's linear layers, stacked in all families, by the parameter that they are parts of."""

Adapters = dict[tuple[str, str], list[LoRA]]
"""Adapters of a parameter, one for each linear layer or one for all, by experts module and parameter, such as
`("base_model.model.model.layers.0.mlp.experts", "down_proj")`."""


class Base:
    """Names and number of a base model's experts.

    Args:
        config: Its `config.json`, or empty.
    """

    def __init__(self, config: Mapping[str, Any]):
        self.config = config
        self.num_experts = count_experts(config)
        self.modules, self.linears = names_of_separate_experts(str(config.get("model_type")))

    def rename(self, module: str, *, to_files: bool) -> str:
        """Return the name of a module in files, or from files in the model."""
        for in_files, in_model in self.modules:
            module = module.replace(in_model, in_files) if to_files else module.replace(in_files, in_model)
        return module


def convert(source: Path, target: Path, to: str, base: Path | None = None) -> int:
    """Write the adapters in `source` to the new folder `target`, in another layout or merged with their base.

    Each expert's update, `scaling * lora_B @ lora_A`, stays the same: the written folder is read again, and both
    matrices of each expert have to be bitwise equal. The scaling is compared by the rule of the program that reads it.
    `use_rslora` is folded into `lora_alpha`, because SGLang does not read it.

    A merged model has the files, names and types of its base, with each update added in float32, or in float64 to
    float64 weights. One file of the base is in memory at a time.

    Args:
        source: A folder with `adapter_config.json` and `adapter_model.safetensors`, in any layout.
        target: The folder to make.
        to: "peft", "vllm", "sglang" or "merged".
        base: The folder of the base model, for vLLM's names and "merged". None: as in `adapter_config.json`.

    Returns:
        The number of updates that were compared or merged, one for each expert and parameter.

    Raises:
        UserError: The other layout cannot express the adapters, they do not fit the base, or `target` exists. Nothing
            was written.

    Example:
        >>> convert(Path("adapter"), Path("adapter-vllm"), "vllm", base=Path("base"))
    """
    settings = read_settings(source).model_dump(exclude_unset=True)
    family = Base(_config_of(base, settings))
    files = AdapterFiles(source, family.config)
    _require_convertible(files, settings, to)
    if target.exists():
        raise UserError(f"target={str(target)!r}: exists. Give a new folder.")
    matrices = list(find_matrices(files).values())
    model = MergedModel(base or named_base(files)) if to == "merged" else None
    if model is not None:
        layout = "vllm" if model.has_separate({matrix.layer for matrix in matrices}) else "sglang"
    else:
        layout = "peft" if to == "vllm" and str(family.config.get("model_type")) in VLLM_STACKED else to
    if not family.linears and ((layout == "vllm" and matrices) or any(map(_is_separate, matrices))):
        raise UserError("base: has no config.json of a family with linear layers. Give the folder of the base model.")
    adapters = _read(files, matrices, family)
    if not adapters and model is None:
        raise UserError(f"{files.folder}: has no adapters of experts. Other adapters are the same in every layout.")
    if layout == "vllm" and (
        unfit := [
            name
            for (_, name), parts in adapters.items()
            if not (of := family.linears.get(name)) or (len(parts) == 1 and parts[0].b.shape[1] % len(of))
        ]
    ):
        raise UserError(f"base: its linear layers do not fit {unfit[0]}. Give the folder of the adapters' base model.")
    if layout != "vllm":
        adapters = {(module, name): [_joined(f"{module}.{name}", parts)] for (module, name), parts in adapters.items()}
    others = {name: files.rows(name, None, 0, sys.maxsize) for name in files.tensors if ".experts." not in name}
    pairs = _pairs(others, files)
    if model is not None:
        if unpaired := others.keys() - {name for pair in pairs for name in pair}:
            raise UserError(f"{files.folder}: {min(unpaired)} is not of an adapter. Merge it with PEFT.")
        model.add(_in_layout(adapters, layout, family))
        model.add(_by_module(pairs))
        model.write(target)
        return sum(len(parts[0].a) for parts in adapters.values()) + len(pairs)
    rank, scaling = _make_uniform(adapters, others, pairs)
    has_rule = settings.get("use_rslora") or settings.get("rank_pattern")
    if has_rule or (rank, scaling) != (files.settings.r, files.settings.scaling(files.settings.r)):
        settings |= {"r": rank, "lora_alpha": scaling * rank, "use_rslora": False, "rank_pattern": {}}
    leaves = {matrix.name.rpartition(".")[0] for matrix in matrices}
    settings |= _targets(settings, adapters, others, leaves, layout, family)
    if layout == "peft" and (files.settings.version or (0,)) < layouts.OLDEST_LAYOUT:
        settings["peft_version"] = ".".join(map(str, layouts.OLDEST_LAYOUT))
    if files.settings.lora_B_layout:
        settings["lora_B_layout"] = layouts.PEFT_ORDER
    target.mkdir(parents=True)
    try:
        tensors = others | {
            f"{name}.{which}.weight": value.contiguous()
            for name, lora in _in_layout(adapters, layout, family)
            for which, value in zip(layouts.IN_FILES, lora[:2], strict=True)
        }
        written = _write(target, settings, tensors, family)
        again = _read(written, find_matrices(written).values(), family)
        for key, parts in adapters.items():
            before, after = _joined(key[1], parts), _joined(key[1], again[key])
            if not _is_same(before.a, after.a) or not _is_same(before.b, after.b):
                raise AssertionError(f"{key}: the adapters changed")
        if not math.isclose(scaling_of(written.settings.model_dump(), to), scaling, rel_tol=1e-15):
            raise AssertionError("the scaling changed")
    except BaseException:
        shutil.rmtree(target)
        raise
    return sum(len(parts[0].a) for parts in adapters.values())


def _targets(
    settings: Mapping[str, Any],
    adapters: Adapters,
    others: Iterable[str],
    leaves: Collection[str],
    layout: str,
    family: Base,
) -> dict[str, Any]:
    """Return the settings that name adapted modules; `leaves` are the names of adapted experts' parameters."""
    if foreign := [name for name in settings.get("target_parameters") or () if name.rpartition(".")[2] not in leaves]:
        raise UserError(
            f"target_parameters: {foreign[0]!r} is not a parameter of experts. Use it with the program that wrote it."
        )
    adapted = {name.rpartition(".lora_")[0].rpartition(".")[2] for name in others}
    given = settings.get("target_modules")
    targets = [name for name in (sorted(adapted) if given is None else given) if name in adapted or name not in leaves]
    if layout == "peft":
        return {"target_parameters": _parameters(adapters, family.config), "target_modules": targets}
    names = layouts.in_order(name for _, name in adapters)
    linears = [linear for name in names for linear in (family.linears[name] if layout == "vllm" else [name])]
    targets += [name for name in linears if name not in targets]
    return {"target_parameters": None, "target_modules": targets}


def _write(target: Path, settings: Mapping[str, Any], tensors: dict[str, Tensor], family: Base) -> AdapterFiles:
    """Write the files of adapters, and return them as they are read. The order of experts is named where values do not
    tell it."""
    save_file(tensors, target / layouts.WEIGHTS, metadata={"format": "pt"})
    for order in ({}, {"lora_B_layout": layouts.PEFT_ORDER}):
        text = json.dumps({**settings, **order}, indent=2, sort_keys=True)
        (target / layouts.CONFIG).write_text(text, encoding="utf-8")
        written = AdapterFiles(target, family.config)
        if written.order == layouts.PEFT_ORDER:
            break
    return written


def _is_same(value: Tensor, other: Tensor) -> bool:
    return torch.equal(value.view(torch.uint8), other.view(torch.uint8))


def _pairs(others: Mapping[str, Tensor], files: AdapterFiles) -> dict[tuple[str, str], LoRA]:
    """Return the adapters of other layers than experts by the names of A and B."""
    names = {name: re.sub("lora_(embedding_)?A", r"lora_\1B", name) for name in others}
    found = {
        (a, b): LoRA(others[a], others[b], files.settings.scaling(len(others[a])))
        for a, b in names.items()
        if a != b in others
    }
    for (name, _), lora in found.items():
        if len(lora.a) != (expected := files.settings.rank(name.partition(".lora_")[0])):
            raise UserError(f"{name}: has rank {len(lora.a)} instead of {expected}. Save the adapters again.")
    return found


def _make_uniform(
    adapters: Adapters, others: dict[str, Tensor], pairs: Mapping[tuple[str, str], LoRA]
) -> tuple[int, float]:
    """Give all adapters, in place, one rank, by zeros, and one scaling; return both.

    vLLM and SGLang read one rank and one scaling, and no patterns.
    """
    loras = [lora for parts in adapters.values() for lora in parts]
    rank, scaling = max(lora.a.shape[-2] for lora in [*loras, *pairs.values()]), loras[0].scaling

    def uniform(lora: LoRA) -> LoRA:
        lacking = rank - lora.a.shape[-2]
        factor = 1.0 if lora.scaling == scaling else lora.scaling / scaling
        if not lacking and factor == 1:
            return lora
        if math.frexp(factor)[0] != 0.5 or min(lora.a.ndim, lora.b.ndim) != max(lora.a.ndim, lora.b.ndim):
            raise UserError(f"{layouts.CONFIG}: scalings differ by {factor:g}, no power of two. Use its own program.")
        b = torch.nn.functional.pad(lora.b * factor, (0, lacking))
        return LoRA(torch.nn.functional.pad(lora.a, (0, 0, 0, lacking)), b, scaling)

    for (a, b), lora in pairs.items():
        others[a], others[b], _ = uniform(lora)
    for key, parts in adapters.items():
        adapters[key] = list(map(uniform, parts))
    return rank, scaling


def scaling_of(settings: Mapping[str, Any], server: str) -> float:
    """Return the factor of updates by the rule of PEFT 0.21.2, vLLM 0.33 (`PEFTHelper`) or SGLang (`LoRAAdapter`).

    SGLang does not read `use_rslora` (sgl-project/sglang#40835).
    """
    is_rooted = settings["use_rslora"] and server != "sglang"
    return float(settings["lora_alpha"] / settings["r"] ** (0.5 if is_rooted else 1))


def _require_convertible(files: AdapterFiles, settings: Mapping[str, Any], to: str) -> None:
    path = files.folder / layouts.CONFIG
    if files.problems:
        raise UserError(f"{files.folder}: {files.problems[0]}. Save the adapters again.")
    unknown = {name: value for name, value in settings.items() if value and name not in CONVERTED}
    if not_off := [name for name, value in unknown.items() if value not in OFF.get(name, ())]:
        raise UserError(
            f"{path}: {not_off[0]} is not known to leave adapters as they are. Use it with the program that wrote it."
        )
    if pattern := next((key for key in settings.get("rank_pattern") or () if re.search(r"[^\w.*^$\\]", key)), None):
        raise UserError(f"{path}: rank_pattern: {pattern!r} is not a suffix of names. Write one for each suffix.")
    if files.order is None:
        raise UserError(
            f"{path}: the order of experts in lora_B cannot be told from its values. Set lora_B_layout to "
            f"{layouts.PEFT_ORDER!r} (PEFT, Unsloth since September 2026) or {layouts.EXPERT_ORDER!r} (older Unsloth)."
        )
    if isinstance(settings.get("target_modules"), str) and to != "merged":
        raise UserError(f"{path}: target_modules is a pattern, and other layouts need names. List the modules there.")


def _config_of(base: Path | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the base model, empty if its folder is neither given nor on this disk."""
    path = (base or Path(str(settings.get("base_model_name_or_path") or ""))) / "config.json"
    if path.exists():
        return read_json(path)
    if base is not None:
        raise UserError(f"base: {str(base)!r} has no config.json. Give the folder of the base model.")
    return {}


def _is_separate(matrix: Matrix) -> bool:
    return any(place.size is None for place in matrix.places.values())


def _read(files: AdapterFiles, matrices: Iterable[Matrix], base: Base) -> Adapters:
    """Return the adapters of experts in `files`. Linear layers are joined to stacked parameters."""
    pairs: dict[tuple[str, str], dict[str, Matrix]] = defaultdict(dict)
    listed: set[str] = set()
    for matrix in matrices:
        name, _, which = matrix.name.rpartition(".")
        pairs[matrix.layer, name][which] = matrix
        listed |= {place.tensor for place in matrix.places.values()}
    if unknown := next((name for name in files.tensors if ".experts." in name and name not in listed), None):
        raise UserError(f"{files.keys[unknown]}: is not of a known layout. Other layouts have no place for it.")
    count = base.num_experts or max((len(each.places) for pair in pairs.values() for each in pair.values()), default=0)
    found: Adapters = {}
    separate: dict[str, dict[str, LoRA]] = defaultdict(dict)
    for (module, name), pair in progress(pairs.items(), "reading adapters"):
        lora = _stacked(files, f"{module}.{name}", pair, count)
        if _is_separate(pair["lora_A"]) or any(name in linears for linears in TINKER.values()):
            separate[base.rename(module, to_files=False)][name] = lora
        else:
            found[module, name] = [lora]
    for module, loras in separate.items():
        for parameter, linears in (*base.linears.items(), *TINKER.items()):
            if parts := [loras.pop(linear) for linear in linears if linear in loras]:
                if len(parts) != len(linears):
                    raise UserError(f"{module}: not all of its linear layers have adapters. A stack cannot say so.")
                if len(parts) > 1 and base.config.get("model_type") == "gpt_oss":
                    raise UserError(f"{module}: gpt-oss has gate and up interleaved. Use it with its own program.")
                found[module, parameter] = parts
        if loras:
            raise UserError(
                f"{module}: has adapters of {min(loras)}, which the base does not have. Give their own base."
            )
    return found


def _stacked(files: AdapterFiles, name: str, pair: Mapping[str, Matrix], count: int) -> LoRA:
    """Return the adapters of a matrix of `count` experts, also if all experts share A or B."""
    of = [dict(pair[which].places) for which in layouts.IN_FILES if which in pair]
    for which, places in zip(layouts.IN_FILES, of, strict=False):
        if files.ids.get(f"{name}.{which}"):
            places |= dict.fromkeys(range(count), places[0])
    if len(of) != len(pair) or len(of) < 2 or any(len(each) != count or max(each) != count - 1 for each in of):
        raise UserError(f"{name}: not all of {count:,} experts have lora_A and lora_B. Other layouts need both.")
    values = [[value_of(files, each[expert]) for expert in range(count)] for each in of]
    a, b = ([value.reshape(-1, *value.shape[-1:]) for value in each] for each in values)
    rank, inputs, outputs = files.rank(name), a[0].shape[-1:], b[0].shape[:1]
    alike = {(x.shape, y.shape, x.dtype, y.dtype) for x, y in zip(a, b, strict=True)}
    if alike != {((rank, *inputs), (*outputs, rank), a[0].dtype, b[0].dtype)}:
        raise UserError(
            f"{name}: not all experts have one type and the rank {rank} of {layouts.CONFIG}. Other layouts need both."
        )
    return LoRA(torch.stack(a), torch.stack(b), files.settings.scaling(rank))


def _joined(name: str, parts: Sequence[LoRA]) -> LoRA:
    """Join the adapters of linear layers to adapters of the stacked parameter.

    Layers with different A keep both: the rank is their sum, and B is block-diagonal.
    """
    first = parts[0]
    if any((part.a.dtype, part.b.dtype) != (first.a.dtype, first.b.dtype) for part in parts):
        raise UserError(f"{name}: its linear layers have different types. A stacked layout has one.")
    if all(_is_same(part.a, first.a) for part in parts):
        return LoRA(first.a, torch.cat([part.b for part in parts], 1), first.scaling)
    b = torch.stack([torch.block_diag(*blocks) for blocks in zip(*(part.b for part in parts), strict=True)])
    return LoRA(torch.cat([part.a for part in parts], 1), b, first.scaling)


def _in_layout(adapters: Adapters, to: str, base: Base) -> Iterator[tuple[str, LoRA]]:
    """Yield the name and matrices of the adapters of experts in the layout `to`."""
    for (module, parameter), parts in adapters.items():
        if to == "vllm":
            linears, in_files = base.linears[parameter], base.rename(module, to_files=True)
            if len(parts) < len(linears):
                parts = [LoRA(parts[0].a, b, parts[0].scaling) for b in parts[0].b.chunk(len(linears), 1)]
            for linear, part in zip(linears, parts, strict=True):
                for expert, (a_RI, b_OR) in enumerate(zip(part.a, part.b, strict=True)):
                    yield f"{in_files}.{expert}.{linear}", LoRA(a_RI.clone(), b_OR.clone(), part.scaling)
        elif to == "sglang":
            yield f"{module}.{parameter}", parts[0]
        else:
            later = layouts.in_order(name for other, name in adapters if other == module)[::-1].index(parameter)
            a, b = map(as_in_files, parts[0][:2], layouts.IN_FILES.values())
            yield f"{module}{layouts.INNER * later}", LoRA(a, b, parts[0].scaling)


def _by_module(pairs: Mapping[tuple[str, str], LoRA]) -> Iterator[tuple[str, LoRA]]:
    """Yield the name of each layer other than experts, and the adapters of its weight as (outputs, inputs)."""
    for (a, _), lora in pairs.items():
        module, _, matrix = a.partition(".lora_")
        is_table = matrix.startswith("embedding") and lora.a.ndim == lora.b.ndim == 2
        yield module, lora.transposed() if is_table else lora


def _parameters(adapters: Adapters, config: Mapping[str, Any]) -> list[str]:
    """Return `target_parameters`, without the numbers of layers if all layers of the model are adapted alike."""
    modules = dict.fromkeys(module.removeprefix(layouts.PREFIX) for module, _ in adapters)
    names = layouts.in_order(name for _, name in adapters)
    numbers = sorted(int(number) for module in modules for number in re.findall(r"\.(\d{1,9})\.", module)[:1])
    first = count if isinstance(count := config.get("first_k_dense_replace"), int) else 0
    is_alike = len(adapters) == len(modules) * len(names) and numbers == [first + i for i in range(len(modules))]
    if is_alike and config.get("num_hidden_layers") in (None, first + len(modules)):
        modules = dict.fromkeys(re.split(r"\.\d+\.", module)[-1] for module in modules)
        return [f"{module}.{name}" for module in modules for name in names]
    return [f"{module.removeprefix(layouts.PREFIX)}.{name}" for module, name in adapters]
