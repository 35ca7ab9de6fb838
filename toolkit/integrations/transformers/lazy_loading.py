"""Lazy, sharded loading: experts stay in the files of a pretrained model until each rank reads its own.

    with experts_in_files():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model, optimizer = ExpertParallel(accelerator).prepare(model, optimizer)       # reads the rows of this rank

All but the experts is loaded as usual. Expert parameters have their shapes and a single number in memory: adapters can
be added, optimizers made, and the model moved and cast. They cannot be called, and have no values to save. Names and
layouts in files are left to transformers' own conversions, which convert one expert of each kind of layer. If they only
place the tensors of its files, all others are read into the same places; else they convert a few experts at a time.
"""

from __future__ import annotations

import copy
import os
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor, nn

from toolkit.errors import UserError, reading, require_choice
from toolkit.experts.layer.rows_in_files import RowsInFiles, as_in_files, stacked
from toolkit.experts.layer.stack import clear_empty
from toolkit.experts.placement.placement import EMPTY_ROW
from toolkit.experts.sharding.find import require_experts
from toolkit.experts.sharding.found import FoundExperts
from toolkit.experts.sharding.sharded_experts import ReadRows, load_lazily
from toolkit.integrations.transformers.compat import experts_implementation, mark_as_loaded, weights_loaded_by
from toolkit.integrations.transformers.cpu_offload import LayersOnHost, RowsOnHost, page_locked
from toolkit.integrations.transformers.kernel import NAME, projections
from toolkit.integrations.transformers.language_models import no_progress_bar, require_floating_point
from toolkit.integrations.transformers.pretrained_files import begins_of_tensors
from toolkit.integrations.transformers.quantization import SCALES, pack_rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.modeling_utils import LoadStateDictConfig

TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types of tensors in safetensors files."""
MOST_READ = 2**25
"""Bytes of a layer's experts that are read at a time, or the size of one expert if larger."""


def experts_at_a_time(bytes_of_one: int) -> int:
    """Return the number of experts that are read at a time, given the bytes of one in files."""
    return max(1, MOST_READ // bytes_of_one)


@contextmanager
def experts_in_files(
    *, quantize: Literal["4bit"] | None = None, offload: Literal["memory"] | str | os.PathLike[str] | None = None
) -> Iterator[None]:
    """Have transformers' `from_pretrained` load experts lazily: each rank reads its own when they are sharded.

    Until `ExpertParallel.prepare`, `shard_experts` or a trainer of `expert_trainer` shards the model, also on one
    process, it cannot be called or saved, and its files have to stay.

    Args:
        quantize: "4bit" packs expert matrices as they are read, see `toolkit.integrations.transformers.quantization`.
            They are frozen; adapters train.
        offload: Storage of frozen expert matrices. "memory" is main memory: a GPU gets a layer's matrices when it is
            computed, see `toolkit.integrations.transformers.cpu_offload`. A folder maps unnamed files into memory, so
            that experts can exceed it. None keeps experts on their compute device.

    Raises:
        UserError: In `from_pretrained`, the same on every rank: files are no safetensors, damaged or quantised, or lack
            experts; the model has no experts that can be sharded; or `quantize` or `offload` are given for experts that
            `use_toolkit_kernel()` does not compute.

    Example:
        >>> with experts_in_files(quantize="4bit"):
        ...     model = causal_lm(folder, experts_implementation=use_toolkit_kernel())
        >>> model = get_peft_model(model, LoraConfig(target_parameters=["mlp.experts.gate_up_proj"]))
        >>> model, optimizer = ExpertParallel(accelerator).prepare(model, AdamW(model.parameters()))
    """
    if quantize is not None:
        require_choice("quantize", quantize, Literal["4bit"])

    def load_all_but_experts(
        load: Callable[..., Any],
        model: PreTrainedModel,
        state_dict: dict[str, Any] | None,  # noqa: ARG001
        checkpoint_files: list[str],
        load_config: LoadStateDictConfig,
        *rest: Any,
    ) -> Any:
        layers = require_experts(model)
        if load_config.hf_quantizer is not None:
            raise UserError("model: its files are quantised. Save it dequantised, or load it without experts_in_files.")
        if quantize is not None or offload is not None:
            known = all(projections(found.module) for found in layers.values())
            if not known or experts_implementation(model.config) != NAME:
                raise UserError(
                    "experts_implementation: quantize and offload need use_toolkit_kernel(), and experts that follow "
                    "it. Pass it to from_pretrained, or leave them out."
                )
        with ExitStack() as opened:
            files = _Files.open(checkpoint_files, opened)
            reader = _Reader(copy.deepcopy(model), load_config, files, layers, quantize is not None, offload)
            of_experts = {key for sources in reader.sources.values() for each in sources for key in each.keys.values()}
            others = {key: files.slices[key] for key in files.slices.keys() - of_experts}
            found = load(model, others, None, load_config, *rest)
        reader.leave_in_files(model)
        found[0].missing_keys.difference_update(reader.parameters)
        return found

    with weights_loaded_by(load_all_but_experts):
        yield


# --- rows in files ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Files:
    """The opened safetensors files of a model."""

    path_of: Mapping[str, str]
    """The file of each tensor."""
    slices: Mapping[str, Any]
    """Each tensor of the files, which is read when it is indexed."""
    begin_of: Mapping[str, int]
    """First byte of each tensor in its file."""

    @classmethod
    def open(cls, paths: Sequence[str], opened: ExitStack) -> _Files:
        """Open files, until `opened` is closed. Raises UserError for an unreadable file."""
        path_of, slices, begin_of = {}, {}, {}
        for path in paths:
            with reading(path, "Download or copy it again, or save the model with save_pretrained."):
                file = opened.enter_context(safe_open(path, framework="pt"))
                begin_of.update(begins_of_tensors(path))
            for key in file.keys():  # noqa: SIM118
                path_of[key], slices[key] = path, file.get_slice(key)
                require_floating_point(key, slices[key], path)
        return cls(path_of, slices, begin_of)


@dataclass(frozen=True)
class _Source:
    """The tensors of files that become rows of one parameter, of one kind in transformers' conversions."""

    keys: Mapping[int, str]
    """The tensor of each expert; one key, -1, if a tensor has all."""
    place: int = -1
    """Index of the expert's number in a dotted name."""

    @classmethod
    def of(cls, keys: Sequence[str]) -> _Source:
        """Group tensors whose names differ in the expert's number only."""
        if len(keys) == 1:
            return cls({-1: keys[0]})
        parts = [key.split(".") for key in keys]
        place = next(i for i, values in enumerate(zip(*parts, strict=True)) if len(set(values)) > 1)
        return cls({int(each[place]): key for each, key in zip(parts, keys, strict=True)}, place)

    def key(self, expert: int) -> str:
        """Return the tensor that has an expert."""
        return self.keys[-1 if -1 in self.keys else expert]

    def row(self, files: _Files, expert: int, num_experts: int) -> Tensor:
        """Return the values of one expert, mapped from the file."""
        whole = files.slices[self.key(expert)]
        if -1 not in self.keys:
            return whole[:]
        count = whole.get_shape()[0] // num_experts  # more than 1 if experts are one after another
        value = whole[expert * count : (expert + 1) * count]
        return value if count > 1 else value[0]

    def read(self, files: _Files, expert: int, to: Tensor) -> bool:
        """Read the values of one expert into `to`, without the page faults of a mapping.

        Returns False if `to` has another type, is on a GPU or is not contiguous.
        """
        key = self.key(expert)
        if not (to.is_cpu and to.is_contiguous() and TYPES.get(files.slices[key].get_dtype()) == to.dtype):
            return False
        with open(files.path_of[key], "rb", buffering=0) as file:
            file.seek(files.begin_of[key] + (expert * to.nbytes if -1 in self.keys else 0))
            return file.readinto(to.view(torch.uint8).numpy().data) == to.nbytes

    def rows(self, files: _Files, experts: Sequence[int], num_experts: int) -> dict[str, Any]:
        """Return the tensors of `experts` by their names in a model whose experts are these slots."""
        if -1 in self.keys:
            return {self.keys[-1]: _Rows(files.slices[self.keys[-1]], experts, num_experts)}
        found = {}
        for slot, expert in enumerate(experts):
            key = self.keys[max(expert, 0)]  # an empty slot is cleared afterwards
            parts = key.split(".")
            parts[self.place] = str(slot)
            found[".".join(parts)] = files.slices[key]
        return found


@dataclass(frozen=True)
class _Rows:
    """The rows of some experts, of a tensor in a file with the rows of all."""

    whole: Any
    experts: Sequence[int]
    num_experts: int

    def __getitem__(self, _: Any) -> Tensor:
        count = self.whole.get_shape()[0] // self.num_experts  # of an expert, if they are one after another
        return torch.cat([self.whole[max(expert, 0) * count : (max(expert, 0) + 1) * count] for expert in self.experts])


@dataclass(frozen=True)
class _Place:
    """The part of a parameter's row that is a tensor of files."""

    name: str
    part: tuple[slice, ...]
    is_transposed: bool


def _match(values: Sequence[Tensor], rows: Mapping[str, Tensor]) -> list[_Place] | None:
    """Return the place of each of `values` in `rows`; None unless each has one place and they fill the rows."""
    found: list[_Place] = []
    is_filled = {name: torch.zeros(row.shape, dtype=torch.bool) for name, row in rows.items()}
    for value in values:
        places = [place for name, row in rows.items() for place in _places_in(name, row, value)]
        if len(places) != 1:
            return None
        found += places
        is_filled[places[0].name][places[0].part] = True
    is_disjoint = sum(value.numel() for value in values) == sum(row.numel() for row in rows.values())
    return found if is_disjoint and all(filled.all() for filled in is_filled.values()) else None


def _places_in(name: str, row: Tensor, value: Tensor) -> Iterator[_Place]:
    """Yield each place of `value` in `row`, as a whole or as one of several equal parts along a dimension."""
    for is_transposed in (False, True) if value.ndim == 2 else (False,):
        turned = value.T if is_transposed else value
        if turned.ndim != row.ndim or any(size % own for size, own in zip(row.shape, turned.shape, strict=True)):
            continue
        counts = [size // own for size, own in zip(row.shape, turned.shape, strict=True)]
        for index in product(*map(range, counts)) if sum(count > 1 for count in counts) < 2 else ():
            part = tuple(slice(i * own, (i + 1) * own) for i, own in zip(index, turned.shape, strict=True))
            if torch.equal(row[part], turned.to(row.dtype)):
                yield _Place(name, part, is_transposed)


class _Reader:
    """Reads rows of experts out of a model's files."""

    def __init__(
        self,
        skeleton: PreTrainedModel,
        load_config: LoadStateDictConfig,
        files: _Files,
        layers: Mapping[str, FoundExperts],
        packs: bool,
        offload: str | os.PathLike[str] | None,
    ):
        self.skeleton, self.load_config, self.path_of = skeleton, load_config, files.path_of
        self.packs, self.offload, self.layers = packs, offload, layers
        self.on_host = LayersOnHost()
        self._places: dict[str, list[_Place] | None] = {}
        """Places of the tensors in files by kind of layer."""
        self.parameters: dict[str, tuple[torch.Size, RowsInFiles]] = {}
        """Shape of one expert, and form in files of all, of each expert parameter by name."""
        for layer, found in layers.items():
            for name, (parameter, form) in found.parameters().items():
                self.parameters[f"{layer}.{name}"] = found.rows(parameter, form).shape[1:], form
        self.sources = self._find_sources(files)
        _keep_only(layers, skeleton)
        for name, sources in self.sources.items():
            _require_all(sources, layers[name.rpartition(".")[0]].num_experts, files)

    def _find_sources(self, files: _Files) -> dict[str, list[_Source]]:
        """Return the sources of each expert parameter, by the names of transformers' conversions.

        With several results, the first one gives the name.
        """
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

        mapping = self.load_config.weight_mapping or []
        renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
        converters = [each for each in mapping if isinstance(each, WeightConverter)]
        known = self.skeleton.state_dict(keep_vars=True)
        grouped: dict[str, dict[str | None, list[str]]] = defaultdict(lambda: defaultdict(list))
        for key in sorted(files.slices, key=dot_natural_key):
            name, pattern = rename_source_key(key, renamings, converters, self.skeleton.base_model_prefix, known)
            if name not in known and key in known:
                name, pattern = key, None
            if name in self.parameters:
                grouped[name][pattern].append(key)
        return {name: [_Source.of(keys) for keys in patterns.values()] for name, patterns in grouped.items()}

    def leave_in_files(self, model: nn.Module) -> None:
        """Give the experts of `model` placeholder parameters, which are loaded lazily."""
        device = next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))
        for layer, each in self.layers.items():
            for name, (parameter, _) in each.parameters().items():
                number = torch.zeros((), dtype=parameter.dtype, device=device)
                waiting = nn.Parameter(number.expand(parameter.shape), parameter.requires_grad)
                mark_as_loaded(waiting)
                setattr(each.module, name, waiting)
            load_lazily(each.module, self._rows_of(layer))

    def _rows_of(self, layer: str) -> ReadRows:
        """Return a function that reads the rows of a layer; copies of a model share it."""

        def rows(module: Any, experts: Sequence[int]) -> dict[str, Tensor]:
            like = dict(module.named_parameters(recurse=False))
            sizes = (self.parameters[f"{layer}.{name}"][0].numel() * p.itemsize for name, p in like.items())
            step = experts_at_a_time(sum(sizes))
            kept: dict[str, Tensor] = {}
            sources = [source for name in like for source in self.sources.get(f"{layer}.{name}", ())]
            paths = {self.path_of[key] for source in sources for key in source.keys.values()}
            with ExitStack() as opened:
                files = _Files.open(sorted(paths), opened)
                if not self.packs and (places := self._find_places(layer, module, experts, sources, files)):
                    return self._copied(layer, module, experts, sources, places, files)
                for begin in range(0, max(1, len(experts)), step):
                    some = experts[begin : begin + step]
                    state: dict[str, Any] = {}
                    for source in sources:
                        state |= source.rows(files, some, module.num_experts)
                    read = self._read(layer, some, state, next(iter(like.values())).device)
                    read = {name: value.to(like[name].dtype) for name, value in read.items()}
                    read = pack_rows(module, read) if self.packs else read
                    for name, value in read.items():
                        if begin == 0:
                            kept[name] = self._room(module, name, value, len(experts))
                        kept[name][begin : begin + len(some)] = value
                    del read, value  # before the next are read
            return kept

        return rows

    def _copied(
        self,
        layer: str,
        module: Any,
        experts: Sequence[int],
        sources: Sequence[_Source],
        places: Sequence[_Place],
        files: _Files,
    ) -> dict[str, Tensor]:
        """Return the rows of `experts`, each value written once."""
        rows: dict[str, Tensor] = {}
        for name, parameter in module.named_parameters(recurse=False):
            shape, _ = self.parameters[f"{layer}.{name}"]
            rows[name] = self._room(module, name, parameter.new_empty(1, *shape), len(experts))
        for slot, expert in enumerate(experts):
            for source, place in zip(sources, places, strict=True) if expert != EMPTY_ROW else ():
                to = rows[place.name][slot][place.part]
                if place.is_transposed or not source.read(files, expert, to):
                    value = source.row(files, expert, module.num_experts)
                    to.copy_(value.T if place.is_transposed else value)
        return {name: clear_empty(value, experts) for name, value in rows.items()}

    def _find_places(
        self, layer: str, module: Any, experts: Sequence[int], sources: Sequence[_Source], files: _Files
    ) -> list[_Place] | None:
        """Return the place of each source in the rows of a layer, from one expert that transformers converts."""
        like = dict(module.named_parameters(recurse=False))
        keys = [next(iter(source.keys.values())) for source in sources]
        of_files = [(re.sub(r"\d+", "", key), *files.slices[key].get_shape()) for key in keys]
        kind = str(([(name, self.parameters[f"{layer}.{name}"], p.dtype) for name, p in like.items()], of_files))
        if kind not in self._places:
            expert = next((each for each in experts if each != EMPTY_ROW), 0)
            state: dict[str, Any] = {}
            for source in sources:
                state |= source.rows(files, [expert], module.num_experts)
            read = self._read(layer, [expert], state, torch.device("cpu"))
            values = [source.row(files, expert, module.num_experts) for source in sources]
            self._places[kind] = _match(values, {name: value[0] for name, value in read.items()})
        return self._places[kind]

    def _read(
        self, layer: str, experts: Sequence[int], state: dict[str, Any], device: torch.device
    ) -> dict[str, Tensor]:
        """Return the rows of `experts` in `state`, by the name of the parameter within the layer."""
        from transformers.core_model_loading import convert_and_load_state_dict_in_model

        module = self.skeleton.get_submodule(layer)
        whole = {name: getattr(module, name) for name, _ in module.named_parameters(recurse=False)}
        forms = {}
        for name, parameter in whole.items():
            shape, forms[name] = self.parameters[f"{layer}.{name}"]
            rows = as_in_files(parameter.new_empty(len(experts), *shape), forms[name])
            setattr(module, name, nn.Parameter(rows, parameter.requires_grad))
        config = replace(self.load_config, device_map={"": device})
        try:
            with no_progress_bar():
                info, _ = convert_and_load_state_dict_in_model(self.skeleton, state, config)
            for name in whole:
                if getattr(module, name).is_meta:
                    reason = next(iter(info.conversion_errors.values()), "the files lack it")
                    raise UserError(
                        f"model: '{layer}.{name}' cannot be read from files ({reason}). Download or copy the model "
                        "again, or load it without experts_in_files()."
                    )
            return {
                name: clear_empty(stacked(value.detach(), forms[name], len(experts)), experts)
                for name, value in module.named_parameters(recurse=False)
            }
        finally:
            for name, parameter in whole.items():
                setattr(module, name, parameter)

    def _room(self, module: RowsOnHost, name: str, value: Tensor, rows: int) -> Tensor:
        """Allocate `rows` rows like `value`, in the memory that keeps them."""
        shape = torch.Size((rows, *value.shape[1:]))
        is_matrix = name.removesuffix(SCALES) in projections(module)
        if self.offload is None or not is_matrix or module.get_parameter(name).requires_grad:
            return value.new_empty(shape)
        module.keep_on_host(name, self.on_host)
        if self.offload == "memory":
            return page_locked(shape, value.dtype)
        return _room_in_a_file(shape, value.dtype, self.offload)


def _keep_only(layers: Iterable[str], model: nn.Module) -> None:
    """Delete all modules of `model` but `layers`: transformers lists the parameters of all at each conversion."""
    for name, module in list(model.named_modules()):
        for child in dict(module.named_children()):
            path = f"{name}.{child}.".lstrip(".")
            if not any(f"{layer}.".startswith(path) or path.startswith(f"{layer}.") for layer in layers):
                delattr(module, child)


def _require_all(sources: Sequence[_Source], num_experts: int, files: _Files) -> None:
    """Raise UserError if files do not have all experts of a parameter, or not in one shape, which copies broadcast."""
    for source in sources:
        key = next(iter(source.keys.values()))
        if -1 in source.keys:
            found = files.slices[key].get_shape()[0]
            is_complete = found % num_experts == 0
        else:
            found, is_complete = len(source.keys), source.keys.keys() == set(range(num_experts))
        if not is_complete:
            raise UserError(
                f"model: files have {found} rows or tensors like {key!r} for {num_experts} experts. Download or copy "
                "the model again."
            )
        if len({tuple(files.slices[key].get_shape()) for key in source.keys.values()}) > 1:
            raise UserError(f"model: tensors like {key!r} have several shapes. Download or copy the model again.")


def _room_in_a_file(shape: torch.Size, dtype: torch.dtype, folder: str | os.PathLike[str]) -> Tensor:
    """Return a tensor in a file of `folder` that is mapped into memory, and has no name any more."""
    if not shape.numel():
        return torch.empty(shape, dtype=dtype)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        # Else a full disk would end the process at a write.
        os.posix_fallocate(file.fileno(), 0, shape.numel() * dtype.itemsize)
        return torch.from_file(file.name, shared=True, size=shape.numel(), dtype=dtype).view(shape)
