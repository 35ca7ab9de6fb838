"""Pretrained mixtures whose experts stay in their files until they are spread, when each rank reads its own.

    with experts_in_files():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model, optimizer = ExpertParallel(accelerator).prepare(model, optimizer)       # reads the rows of this rank

Everything but the experts is loaded as always. The parameters of experts have their shapes and one number in memory:
adapters can be added and optimizers made, and the model can be moved and cast. What file names and layouts mean is
transformers' own conversion: it is handed the tensors of a few experts in place of all, layer by layer.
"""

from __future__ import annotations

import copy
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from toolkit.errors import UserError, one_line, require, require_choice
from toolkit.experts.layer.stack import clear_empty
from toolkit.experts.parallel.ownership import RowsInFiles, as_in_files, stacked
from toolkit.experts.sharding.libraries import library_that_multiplies
from toolkit.experts.sharding.shard import require_experts, stacked_parameters
from toolkit.integrations.transformers.compat import experts_implementation, mark_as_loaded, weights_loaded_by
from toolkit.integrations.transformers.cpu_offload import keep_on_host, page_locked
from toolkit.integrations.transformers.four_bits import SCALES, pack_rows, require_library
from toolkit.integrations.transformers.kernel import NAME
from toolkit.integrations.transformers.lazy_rows import load_lazily

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.modeling_utils import LoadStateDictConfig


MOST_READ = 2**28
"""Bytes of a layer's experts that are read at a time, or those of one expert where it has more."""


def experts_at_a_time(bytes_of_one: int) -> int:
    """Returns how many experts are read at a time, of which each has so many bytes in files."""
    return max(1, MOST_READ // bytes_of_one)


@contextmanager
def experts_in_files(
    *, quantize: Literal["4bit"] | None = None, offload: Literal["memory"] | str | os.PathLike[str] | None = None
) -> Iterator[None]:
    """Has `from_pretrained` of transformers leave experts in their files, until they are spread.

    Such a model cannot be called or saved before `ExpertParallel.prepare`, `shard_experts` or a trainer of
    `expert_trainer` has spread it, also over one process. Files must be there until then.

    Args:
        quantize: Packs the matrices of experts when they are read, see `toolkit.integrations.transformers.four_bits`:
            they are frozen, and adapters train.
        offload: Where the matrices of frozen experts stay. A CPU computes with them there; to a GPU those of a layer
            come when it is computed: see `toolkit.integrations.transformers.cpu_offload`. "memory" is the host's. A
            folder gets files, which have no names and go with the process. They are mapped into memory, so that experts
            may be more than it holds: the system keeps there those that are used most. None keeps experts where they
            are computed.

    Raises:
        UserError: In `from_pretrained`, the same on every rank, for files that are no safetensors, are quantised, are
            damaged, or lack experts, and for a model without experts that can be spread. For `quantize` without
            bitsandbytes. For `quantize` and `offload` in a model whose experts are not computed by
            `use_toolkit_kernel()`, and for a folder that cannot be written.
    """
    if quantize is not None:
        require_choice("quantize", quantize, Literal["4bit"])
        require_library()
    if offload not in (None, "memory"):
        _require_folder(offload)

    def load_all_but_experts(
        load: Callable[..., Any],
        model: PreTrainedModel,
        state_dict: dict[str, Any] | None,
        checkpoint_files: list[str] | None,
        load_config: LoadStateDictConfig,
        *rest: Any,
    ) -> Any:
        if state_dict is not None or not checkpoint_files or not checkpoint_files[0].endswith(".safetensors"):
            raise UserError("experts_in_files() reads safetensors files: save the model as such with save_pretrained.")
        if load_config.hf_quantizer is not None:
            raise UserError("experts_in_files() reads no quantised files: save the model dequantised.")
        if len(set((load_config.device_map or {}).values())) > 1:
            raise UserError("experts_in_files() puts a model on one device: leave device_map out.")
        layers = require_experts(model)
        ours = experts_implementation(model.config) == NAME and all(map(library_that_multiplies, layers.values()))
        remedy = "it needs experts_implementation=use_toolkit_kernel() of from_pretrained, and experts that follow it"
        require(quantize is None or ours, "quantize", quantize, remedy)
        require(offload is None or ours, "offload", offload, remedy)
        with ExitStack() as opened:
            files = _Files.of(checkpoint_files, opened)
            reader = _Reader(
                copy.deepcopy(model),
                load_config,
                files,
                layers,
                packs=quantize is not None,
                offload=offload,
            )
            others = {key: files.slices[key] for key in files.slices.keys() - reader.keys}
            found = load(model, others, None, load_config, *rest)
        reader.leave_in_files(model, layers)
        found[0].missing_keys.difference_update(reader.parameters)
        return found

    with weights_loaded_by(load_all_but_experts):
        yield


@dataclass(frozen=True)
class _Files:
    """The opened safetensors files of a model."""

    path_of: Mapping[str, str]
    """The file of each tensor."""
    slices: Mapping[str, Any]
    """Each tensor of the files, which is read where it is indexed."""

    @classmethod
    def of(cls, paths: Sequence[str], opened: ExitStack) -> _Files:
        """Open files that stay open until `opened` is closed. Raises UserError for a damaged or missing one."""
        path_of, slices = {}, {}
        for path in paths:
            try:
                file = opened.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise UserError(
                    f"model file {path} cannot be read ({one_line(error)}): download or copy it again."
                ) from error
            for key in file.keys():  # noqa: SIM118
                path_of[key], slices[key] = path, file.get_slice(key)
        return cls(path_of, slices)


@dataclass(frozen=True)
class _Source:
    """The tensors of files that become rows of one parameter, by transformers' name for their kind."""

    keys: Mapping[int, str]
    """The tensor of each expert; of one key, -1, where a tensor has all."""
    place: int = -1
    """Which part of a name, between dots, is the expert's number."""

    @classmethod
    def of(cls, keys: Sequence[str]) -> _Source:
        """Group tensors whose names differ in the experts' number alone."""
        if len(keys) == 1:
            return cls({-1: keys[0]})
        parts = [key.split(".") for key in keys]
        place = next(i for i, values in enumerate(zip(*parts, strict=True)) if len(set(values)) > 1)
        return cls({int(each[place]): key for each, key in zip(parts, keys, strict=True)}, place)

    def renumbered(self, expert: int, slot: int) -> str:
        """Returns the name that the tensor of `expert` has in a model whose experts are the slots of a rank."""
        parts = self.keys[expert].split(".")
        parts[self.place] = str(slot)
        return ".".join(parts)


class _Reader:
    """Reads rows of experts out of a model's files."""

    def __init__(
        self,
        skeleton: PreTrainedModel,
        load_config: LoadStateDictConfig,
        files: _Files,
        layers: Mapping[str, nn.Module],
        *,
        packs: bool,
        offload: str | os.PathLike[str] | None,
    ):
        self.skeleton, self.load_config, self.path_of = skeleton, load_config, files.path_of
        self.packs, self.offload = packs, offload
        self.parameters: dict[str, RowsInFiles] = {}
        """How files have each parameter of experts, by name."""
        for layer, module in layers.items():
            parameters, forms = stacked_parameters(module)
            self.parameters |= {f"{layer}.{name}": forms.get(name, "stacked") for name in parameters}
        self.sources = self._find_sources(files)
        for name in self.parameters:
            layer = name.rpartition(".")[0]
            self._check(name, layers[layer].num_experts, files)  # type: ignore[arg-type]

    @cached_property
    def keys(self) -> set[str]:
        """The names of all tensors in files that experts are made of."""
        return {key for sources in self.sources.values() for each in sources for key in each.keys.values()}

    def _find_sources(self, files: _Files) -> dict[str, list[_Source]]:
        """Return what each parameter of experts is made of, by the names of transformers' conversions.

        A conversion with several results is known by its first.
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

    def _check(self, name: str, experts: int, files: _Files) -> None:
        """Raise UserError where files have not all experts of the parameter `name`."""
        for source in self.sources.get(name, ()):
            if -1 in source.keys:
                found = files.slices[source.keys[-1]].get_shape()[0]
                complete = found % experts == 0
            else:
                found, complete = len(source.keys), source.keys.keys() == set(range(experts))
            if not complete:
                key = next(iter(source.keys.values()))
                raise UserError(
                    f"model files have {found} rows or tensors like {key!r} for {experts} experts: "
                    "download or copy the model again."
                )

    def leave_in_files(self, model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
        """Give the experts of `model` parameters that have their shapes and no values, and wait for rows."""
        device = next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))
        for layer, module in layers.items():
            for name, parameter in stacked_parameters(module)[0].items():
                number = torch.zeros((), dtype=parameter.dtype, device=device)
                waiting = nn.Parameter(number.expand(parameter.shape), parameter.requires_grad)
                mark_as_loaded(waiting)
                setattr(module, name, waiting)
            load_lazily(module, _LayerInFiles(self, layer))

    def read(self, layer: str, experts: Sequence[int], device: torch.device) -> dict[str, Tensor]:
        """Return the rows of `experts`, by the name of the parameter within the layer."""
        from transformers.core_model_loading import convert_and_load_state_dict_in_model

        module = self.skeleton.get_submodule(layer)
        whole = {name: getattr(module, name) for name, _ in module.named_parameters(recurse=False)}
        forms = {name: self.parameters[f"{layer}.{name}"] for name in whole}
        for name, parameter in whole.items():
            rows = as_in_files(parameter.new_empty(len(experts), *parameter.shape[1:]), forms[name])
            setattr(module, name, nn.Parameter(rows, parameter.requires_grad))
        config = replace(self.load_config, device_map={"": device})
        sources = [source for name in whole for source in self.sources.get(f"{layer}.{name}", ())]
        try:
            with ExitStack() as opened, _no_progress_bar():
                paths = sorted({self.path_of[key] for source in sources for key in source.keys.values()})
                state = _rows_in(sources, experts, len(next(iter(whole.values()))), _Files.of(paths, opened))
                info, _ = convert_and_load_state_dict_in_model(self.skeleton, state, config)
            for name in whole:
                if getattr(module, name).is_meta:
                    reason = str(next(iter(info.conversion_errors.values()), ""))
                    if not reason:
                        raise UserError(f"model files lack '{layer}.{name}': download or copy the model again.")
                    raise UserError(
                        f"experts' parameter '{layer}.{name}' cannot be read from files ({' '.join(reason.split())}): "
                        "load the model without experts_in_files()."
                    )
            return {
                name: clear_empty(stacked(value.detach(), forms[name], len(experts)), experts)
                for name, value in module.named_parameters(recurse=False)
            }
        finally:
            for name, parameter in whole.items():
                setattr(module, name, parameter)


@dataclass(frozen=True)
class _LayerInFiles:
    """The experts of one layer, which wait in files."""

    reader: _Reader
    layer: str

    def __call__(self, module: nn.Module, experts: Sequence[int]) -> dict[str, Tensor]:
        like = dict(module.named_parameters(recurse=False))
        device, offload = next(iter(like.values())).device, self.reader.offload
        step = experts_at_a_time(sum(p.shape[1:].numel() * p.itemsize for p in like.values()))
        kept: dict[str, Tensor] = {}
        for begin in range(0, max(1, len(experts)), step):
            some = experts[begin : begin + step]
            rows = self.reader.read(self.layer, some, device)
            rows = {name: value.to(like[name].dtype) for name, value in rows.items()}
            rows = pack_rows(module, rows) if self.reader.packs else rows
            if len(some) == len(experts) and offload is None:
                return rows
            for name, value in rows.items():
                if begin == 0:
                    kept[name] = self._room(module, name, value, len(experts))
                kept[name][begin : begin + len(some)] = value
            del rows, value  # before the next are read
        return kept

    def _room(self, module: nn.Module, name: str, value: Tensor, rows: int) -> Tensor:
        """Return where so many rows like those of `value` are kept."""
        shape, offload = torch.Size((rows, *value.shape[1:])), self.reader.offload
        library = library_that_multiplies(module)
        is_matrix = library is not None and name.removesuffix(SCALES) in library.projections(module)
        if offload is None or not is_matrix or module.get_parameter(name).requires_grad:
            return value.new_empty(shape)
        keep_on_host(module, name)
        return page_locked(shape, value.dtype) if offload == "memory" else _room_in_a_file(shape, value.dtype, offload)

    def __deepcopy__(self, memo: dict[int, Any]) -> _LayerInFiles:
        return self


def _rows_in(sources: Sequence[_Source], experts: Sequence[int], num_experts: int, files: _Files) -> dict[str, Any]:
    """Return the tensors of `experts` by the names that they have in a model whose experts are these slots."""
    state: dict[str, Any] = {}
    for source in sources:
        if -1 in source.keys:
            key = source.keys[-1]
            state[key] = _Rows(files.slices[key], experts, num_experts)
            continue
        for slot, expert in enumerate(experts):
            known = max(expert, 0)  # an empty slot is cleared afterwards
            state[source.renumbered(known, slot)] = files.slices[source.keys[known]]
    return state


@dataclass(frozen=True)
class _Rows:
    """The rows of some experts, of a tensor in a file with the rows of all."""

    whole: Any
    experts: Sequence[int]
    num_experts: int

    def __getitem__(self, _: Any) -> Tensor:
        count = self.whole.get_shape()[0] // self.num_experts  # of an expert, where they are one after another
        return torch.cat([self.whole[max(expert, 0) * count : (max(expert, 0) + 1) * count] for expert in self.experts])


def _require_folder(folder: str | os.PathLike[str]) -> None:
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(f"offload={folder} cannot be written ({one_line(error)}): give another.") from error


def _room_in_a_file(shape: torch.Size, dtype: torch.dtype, folder: str | os.PathLike[str]) -> Tensor:
    """Return a tensor in a file of `folder`, which is mapped into memory and has no name any more."""
    if not shape.numel():
        return torch.empty(shape, dtype=dtype)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        try:
            size = shape.numel() * dtype.itemsize
            os.posix_fallocate(file.fileno(), 0, size)  # else a full disk would end the process at a write
        except OSError as error:
            raise UserError(f"offload={folder} has no room for experts ({error.strerror}): give another.") from error
        return torch.from_file(file.name, shared=True, size=shape.numel(), dtype=dtype).view(shape)


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()
