"""The tensors of a checkpoint folder: listed without values, and read in parts of bounded size.

There is a class for each format: safetensors files, files of `torch.save`, adapters and checkpoints of a run. None of
them executes code of the folder.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import safe_open
from torch import Tensor

from toolkit.audit.checkpoint import REMEDY, Checkpoint, Listed, read_json, require_regular
from toolkit.checkpoint.retention import find_folder
from toolkit.errors import UserError, reading
from toolkit.experts.state import manifest
from toolkit.experts.state.keys import NUMBER, weight_of_key
from toolkit.integrations.peft import layouts
from toolkit.torch_files import load_plain

MAPPED = 2**28
"""Bytes that are read from an open safetensors file before it is opened again, which frees the pages of its mapping."""
SAME = 1e-3
"""Relative difference of norms in float32 that counts as rounding."""


MEGATRON = "Megatron-Bridge's AutoBridge.export_ckpt"
DEEPSPEED = "python zero_to_fp32.py <folder> <output> --safe_serialization"
FOREIGN = (
    ("**/*zero_pp_rank_*", "DeepSpeed", DEEPSPEED),
    ("**/*_model_states.pt", "DeepSpeed", DEEPSPEED),
    ("**/mp_rank_*", "Megatron-LM", MEGATRON),
    ("latest_checkpointed_iteration.txt", "Megatron-LM", MEGATRON),
)
"""Files of other programs as a pattern, the program, and what converts them."""


def open_checkpoint(folder: Path) -> Checkpoint:
    """List the tensors of `folder`.

    Raises:
        UserError: The folder has no tensors, or a file cannot be read.
    """
    file = folder.name if folder.is_file() else None
    folder = folder.parent if file else folder
    if not folder.is_dir():
        raise UserError(f"{folder}: does not exist. Give the folder or the file of a checkpoint.")
    config = read_json(folder / "config.json") if (folder / "config.json").exists() else {}
    if file and file.endswith((".bin", ".pt", ".pth")):
        return TorchFiles(folder, config, [file])
    if file and not file.endswith(".safetensors"):
        raise UserError(f"{folder / file}: is not a file of weights. Give a .safetensors, .bin, .pt or .pth file.")
    if (folder / layouts.CONFIG).exists():
        return AdapterFiles(folder, config)
    is_run = (folder / manifest.NAME).exists() or any(folder.glob(f"experts_*/{manifest.NAME}"))
    if not is_run and (folder / ".metadata").exists():
        from toolkit.audit.distributed_checkpoint import DistributedCheckpoint

        return DistributedCheckpoint(folder, config)
    if not is_run and any(folder.glob("*.safetensors*")):
        return SafetensorsFiles(folder, config, file)
    if not is_run and (names := sorted(path.name for path in folder.glob("pytorch_model*.bin"))):
        return TorchFiles(folder, config, names)
    for pattern, program, command in FOREIGN:
        if not is_run and (found := next(folder.glob(pattern), None)):
            seen = found.relative_to(folder)
            raise UserError(f"{folder}: has {seen}, a file of {program}. Write safetensors files with {command}.")
    return RunCheckpoint(find_folder(folder), config)


def named_base(checkpoint: Checkpoint) -> Path | None:
    """Return the base that adapters name, if it is a folder with weights here."""
    name = checkpoint.settings.base_model_name_or_path if isinstance(checkpoint, AdapterFiles) else None
    folder = Path(name or "")
    return folder if name and (folder / "config.json").is_file() and any(folder.glob("*.safetensors")) else None


def read_settings(folder: Path) -> layouts.AdapterSettings:
    """Return the settings of adapters. Raises UserError if they cannot be read."""
    path = folder / layouts.CONFIG
    try:
        return layouts.AdapterSettings.model_validate(read_json(path))
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        name = ".".join(map(str, first["loc"])) or "settings"
        raise UserError(f"{path}: {name}: {first['msg']}. {REMEDY}") from None


class _Files:
    """Safetensors files, opened again after `MAPPED` bytes."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._open: tuple[str, Any] = ("", None)
        self._read = 0

    def list(self, file: str) -> dict[str, Listed]:
        """Return the tensors of a file by key."""
        path = require_regular(self.folder / file)
        with reading(path, REMEDY), safe_open(path, "pt") as opened:
            slices = {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118
            return {key: Listed(tuple(each.get_shape()), each.get_dtype(), file) for key, each in slices.items()}

    def rows(self, file: str, key: str, begin: int, end: int) -> Tensor:
        with reading(self.folder / file, REMEDY):  # torch may lack the type
            if self._open[0] != file or self._read > MAPPED:
                self._open, self._read = (file, safe_open(self.folder / file, "pt")), 0
            piece = self._open[1].get_slice(key)
            value: Tensor = piece[begin:end] if piece.get_shape() else self._open[1].get_tensor(key)
        self._read += value.nbytes
        return value


class SafetensorsFiles(Checkpoint):
    """A model in safetensors files, with an index if there are several."""

    kind = "safetensors"

    def __init__(self, folder: Path, config: Mapping[str, Any], only: str | None = None):
        super().__init__(folder, config)
        self._files = _Files(folder)
        names = [only] if only else sorted(path.name for path in folder.glob("*.safetensors"))
        for file in names:
            for key, listed in self._files.list(file).items():
                if key in self.tensors:
                    self.problems.append(f"{key} is in {self.tensors[key].file} and in {file}")
                self.tensors[key] = listed
        for path in sorted(folder.glob("*.safetensors.index.json")) if only is None else ():
            self._check_index(path, names)

    def _check_index(self, path: Path, files: Sequence[str]) -> None:
        entries = read_json(path).get("weight_map")
        if not isinstance(entries, dict) or not all(isinstance(file, str) for file in entries.values()):
            raise UserError(f"{path}: has no weight_map. {REMEDY}")
        if outside := next((file for file in entries.values() if Path(file).name != file), None):
            raise UserError(f"{path}: names {outside!r}, which is outside of the folder. {REMEDY}")
        lost = [file for file in dict.fromkeys(entries.values()) if file not in files]
        self.problems += [f"{path.name} names {file}, which is missing" for file in lost]
        stem = path.name.removesuffix(".safetensors.index.json")
        of_index = {file for file in files if file.startswith(stem)}
        for key, listed in self.tensors.items():
            if listed.file in of_index and key not in entries:
                self.problems.append(f"{key} is in {listed.file}, and {path.name} has no entry for it")
        for key, file in entries.items():
            if file in files and (key not in self.tensors or self.tensors[key].file != file):
                self.problems.append(f"{path.name} has {key} in {file}, which does not have it")

    def rows(self, name: str, state: str | None, begin: int, end: int) -> Tensor:  # noqa: ARG002
        return self._files.rows(self.tensors[name].file, name, begin, end)


class TorchFiles(Checkpoint):
    """A model in files of `torch.save`, whose tensors are mapped and not loaded."""

    kind = "torch.save"

    def __init__(self, folder: Path, config: Mapping[str, Any], files: Sequence[str]):
        super().__init__(folder, config)
        self._values: dict[str, Tensor] = {}
        for file in files:
            path = require_regular(folder / file)
            with reading(path, REMEDY):
                saved = load_plain(path)
                for name in ("model", "module", "state_dict"):
                    saved = saved[name] if isinstance(saved.get(name), dict) else saved
                for name, value in saved.items():
                    is_plain = isinstance(value, Tensor) and value.layout == torch.strided and not value.is_quantized
                    if is_plain and isinstance(name, str) and value.device.type == "cpu":
                        if value.nbytes > path.stat().st_size:
                            raise ValueError(f"{name!r} has more bytes than the file")
                        self._values[name] = value.detach()
                        self.tensors[name] = Listed(tuple(value.shape), str(value.dtype).removeprefix("torch."), file)

    def rows(self, name: str, state: str | None, begin: int, end: int) -> Tensor:  # noqa: ARG002
        value = self._values[name].resolve_conj().resolve_neg()
        return value[begin:end] if value.ndim else value


class AdapterFiles(Checkpoint):
    """Adapters in a layout of PEFT, vLLM, SGLang or Unsloth.

    Expert adapters are listed as `<experts>.<parameter>.lora_A`, shape (E, r, I), and `.lora_B`, shape (E, O, r), or as
    `<experts>.<expert>.<linear layer>.lora_A`, shape (r, I), and `.lora_B`, shape (O, r).
    """

    kind = "adapters"

    def __init__(self, folder: Path, config: Mapping[str, Any]):
        super().__init__(folder, config)
        self.settings = read_settings(folder)
        self._files = _Files(folder)
        self._last: tuple[str, Tensor] = ("", torch.empty(0))
        self.keys: dict[str, str] = {}
        """Name in the file of each tensor."""
        self._columns: dict[str, int] = {}
        """Rank by the name in the file of each `lora_B` with a column for each row of its `lora_A`."""
        listed = self._files.list(layouts.WEIGHTS)
        fused: dict[str, set[str]] = defaultdict(set)
        for found in filter(None, map(layouts.FUSED.fullmatch, listed)):
            fused[found["module"]].add(found["inner"])
        parameters = {module: self.settings.parameters(module) for module in fused}
        wrong = [
            module
            for module, inner in fused.items()
            if inner != {layouts.INNER * depth for depth in range(len(parameters[module]))}
        ]
        for module in wrong:
            counts = f"{len(fused[module])} adapters for {len(parameters[module])} target_parameters"
            self.problems.append(f"{module} has {counts}")
        self.swapped = {module for module in fused.keys() - set(wrong) if self._is_swapped(module, parameters, listed)}
        """Modules whose adapters are of transposed matrices."""
        for key, each in listed.items():
            if match := layouts.FUSED.fullmatch(key):
                if (module := match["module"]) not in wrong:
                    at = f"{module}.{parameters[module][-1 - match['inner'].count(layouts.INNER)]}"
                    matrix, shape = match["matrix"], self._shape_of_experts(key, at, match["matrix"], each)
                    if shape and module in self.swapped:
                        matrix, shape = layouts.TRANSPOSED[matrix], (shape[0], *shape[:0:-1])
                    a = listed.get(key.replace("lora_B", "lora_A")) if match["matrix"] == "lora_B" else None
                    if shape and a and len(a.shape) == 2 and a.shape[:1] == each.shape[1:]:
                        self._columns[key] = self.rank(at)
                    self._list(f"{at}.{matrix}", key, each._replace(shape=shape) if shape else None)
            elif match := layouts.LISTED.fullmatch(key):
                self._list("{module}.{expert}.{linear}.{matrix}".format(**match.groupdict()), key, each)
            elif layouts.STACKED.fullmatch(key) and len(each.shape) != 3:
                self.problems.append(f"{key} has shape {each.shape} instead of three dimensions")
            else:
                self._list(key.removesuffix(".weight") if ".experts." in key else key, key, each)
        if unread := next((key for key in listed if not key.startswith(layouts.PREFIX)), None):
            self.problems.append(f"{unread} does not begin with {layouts.PREFIX}, so it is not loaded")

    def _is_swapped(
        self, module: str, parameters: Mapping[str, Sequence[str]], listed: Mapping[str, Listed]
    ) -> bool | None:
        sizes = {}
        for depth, name in enumerate(reversed(parameters[module])):
            at = f"{module}{layouts.INNER * depth}.lora_"
            a, b = (listed.get(f"{at}{matrix}.weight") for matrix in "AB")
            if a and b and a.shape and b.shape:
                sizes[name] = a.shape[-1], b.shape[0]
        is_swapped = layouts.is_swapped(sizes, self.config.get("hidden_size"))
        if is_swapped is None and (version := self.settings.version):
            is_swapped = version < layouts.OLDEST_LAYOUT
        if is_swapped is None:
            self.problems.append(f"{module} does not show which side is the input: write its peft_version")
        return is_swapped

    def _shape_of_experts(self, key: str, parameter: str, matrix: str, listed: Listed) -> tuple[int, ...] | None:
        rank = self.rank(parameter)
        if (shape := layouts.shape_of_experts(listed.shape, matrix, rank)) is None:
            self.problems.append(f"{key} has shape {listed.shape}, which rank {rank} does not divide")
        return shape

    @cached_property
    def _chosen(self) -> int:
        """Experts of a token if NeMo AutoModel divided the rank of experts by them, else 1."""
        path = self.folder / layouts.NEMO
        if not path.exists() or not read_json(path).get("moe_rank_scaling"):
            return 1
        if not isinstance(chosen := self.config.get("num_experts_per_tok"), int) or chosen < 1:
            raise UserError(f"{path}: divides the rank by num_experts_per_tok of the base. Give the base's folder.")
        return chosen

    def rank(self, parameter: str) -> int:
        """Return the rank of the adapters of a parameter of experts."""
        return max(1, self.settings.rank(parameter) // self._chosen)

    @cached_property
    def order(self) -> str | None:
        """Order of the columns of PEFT's `lora_B`, None if neither the settings nor its values tell."""
        if not self._columns or self.has_record or self.settings.lora_B_layout:
            return self.settings.lora_B_layout or layouts.PEFT_ORDER
        rows = partial(self._files.rows, layouts.WEIGHTS, begin=0, end=sys.maxsize)
        pairs = ((rows(key.replace("lora_B", "lora_A")), rows(key), rank) for key, rank in self._columns.items())
        return layouts.order_of_columns(pairs)

    def _list(self, name: str, key: str, listed: Listed | None) -> None:
        if listed is None:
            return
        if name in self.tensors:
            self.problems.append(f"{key} and {self.keys[name]} are of the same experts")
        self.tensors[name], self.keys[name] = listed, key
        if len(listed.shape) == 3 and listed.shape[0] == 1:
            self.ids[name] = {0}  # all experts share it

    @property
    def has_record(self) -> bool:
        """Whether `save_pretrained` of this toolkit wrote its record."""
        return (self.folder / layouts.RECORD).exists()

    @property
    def has_patterns(self) -> bool:
        """Whether modules have ranks or scalings of their own."""
        return bool(self.settings.rank_pattern or self.settings.alpha_pattern)

    def rows(self, name: str, state: str | None, begin: int, end: int) -> Tensor:  # noqa: ARG002
        if (match := layouts.FUSED.fullmatch(self.keys[name])) is None:
            return self._files.rows(layouts.WEIGHTS, self.keys[name], begin, end)
        if self._last[0] != name:
            whole = self._files.rows(layouts.WEIGHTS, self.keys[name], 0, sys.maxsize)
            rank = self.rank(name.rpartition(".")[0])
            value = layouts.of_experts(whole, match["matrix"], rank, self.order)
            self._last = name, value.mT.contiguous() if match["module"] in self.swapped else value
        return self._last[1][begin:end]

    def differences(self) -> Iterator[tuple[str, str]]:
        """Yield check and message for each difference from PEFT's layout, and from the record of `save_pretrained`."""
        remedy = "`toolkit adapter convert --to peft` repairs it"
        if self.swapped:
            yield "files", f"{min(self.swapped)} has inputs and outputs swapped, as before PEFT 0.19.1: {remedy}"
        if self.order == layouts.EXPERT_ORDER:
            yield "files", f"lora_B has another order of experts than PEFT and vLLM read, as old Unsloth: {remedy}"
        if not self.has_record:
            return
        record = read_json(self.folder / layouts.RECORD)
        with reading(self.folder / layouts.RECORD, REMEDY):
            scalings = {name: float(value) for name, value in record["scaling"].items()}
            differ, trained = list(record["differ"]), list(record["trained_of_base"])
            recorded = {name: torch.tensor(each, dtype=torch.float64) for name, each in record["norms"].items()}
        names = {key: name for name, key in self.keys.items()}
        for parameter, then_E in recorded.items():
            name = names.get(parameter.replace(".default.", "."))
            if name is None or then_E.shape != (experts := self.tensors[name].shape[:1]) or not sum(experts):
                yield "experts", f"{parameter}: was trained and is not there"
                continue
            now_E = self.rows(name, None, 0, experts[0]).double().flatten(1).norm(dim=1)
            if bool(((then_E - now_E).abs() > SAME * then_E.max()).any()):
                reordered = torch.allclose(then_E.sort().values, now_E.sort().values, rtol=SAME)
                said = "experts are in another order than" if reordered else "norms are not those of what"
                yield "order" if reordered else "values", f"{name}: {said} the ranks had at saving"
        scaling = self.settings.scaling(self.settings.r)
        changed = {name for name, then in scalings.items() if abs(then - scaling) > SAME * abs(then)}
        if changed and not self.has_patterns:
            yield (
                "scaling",
                f"{min(changed)}: was {scalings[min(changed)]:g} in training, and is {scaling:g} by {layouts.CONFIG}",
            )
        if differ:
            yield "ranks", f"ranks had different values of {len(differ)} replicated adapters, such as {differ[0]}"
        if trained:
            yield (
                "base",
                f"{len(trained)} parameters of the base were trained, such as {trained[0]}, and are not saved here",
            )


class RunCheckpoint(Checkpoint):
    """A checkpoint of a run, whose files have a SHA-256 each."""

    kind = "a checkpoint of a run"

    def __init__(self, folder: Path, config: Mapping[str, Any]):
        super().__init__(folder, config)
        with reading(folder / manifest.NAME, REMEDY):
            about = manifest.read_manifest(folder)
            names, places = about["files"], about["placement"]
            self.ids = {name: {id for row in each["slots"] for id in row if id >= 0} for name, each in places.items()}
        if damage := manifest.find_damage(folder):
            self.problems.append(damage)
            return
        self._files = _Files(folder)
        self._keys: dict[tuple[str, str | None], str] = {}
        for file in (name for name in names if name.endswith(".safetensors")):
            for key, listed in self._files.list(file).items():
                weight, state = weight_of_key(file, key)
                self._keys[weight, state] = key
                if state is None:
                    self.tensors[weight] = listed
                elif not state.endswith(NUMBER):
                    self.states.setdefault(weight, {})[state] = listed

    def rows(self, name: str, state: str | None, begin: int, end: int) -> Tensor:
        file = (self.tensors[name] if state is None else self.states[name][state]).file
        return self._files.rows(file, self._keys[name, state], begin, end)
