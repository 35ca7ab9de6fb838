"""Checkpoints of `torch.distributed.checkpoint`, whose metadata is unpickled without calling functions."""

from __future__ import annotations

import io
import math
import pickle
import re
import warnings
from collections.abc import Container, Iterable, Mapping
from dataclasses import is_dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, load
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from toolkit.audit.checkpoint import REMEDY, Checkpoint, Listed, require_regular
from toolkit.errors import reading
from toolkit.torch_files import require_small_tuples

METADATA = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath"},
}
"""The only names, by module, that unpickled metadata may use, besides torch's types of numbers."""


class _MetadataUnpickler(pickle._Unpickler):
    """Reads metadata of `torch.distributed.checkpoint`, and imports nothing else.

    Python's own implementation, because that in C allocates memory for any memo index.
    """

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in METADATA.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not part of a checkpoint's metadata")

    def load_build(self: Any) -> None:
        """Set attributes of metadata only: a class would be changed for the whole process."""
        if not is_dataclass(type(self.stack[-2])):
            raise pickle.UnpicklingError(f"a {type(self.stack[-2]).__name__} has no attributes to set")
        pickle._Unpickler.dispatch[pickle.BUILD[0]](self)

    dispatch[pickle.BUILD[0]] = load_build
    for _code in (pickle.BYTEARRAY8, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER):
        del dispatch[_code[0]]


class _Reader(FileSystemReader):
    """Torch's reader, which unpickles metadata without calling functions, and once."""

    @cached_property
    def metadata(self) -> Metadata:
        path = require_regular(Path(self.path) / ".metadata")
        with reading(path, REMEDY), warnings.catch_warnings(action="ignore"):
            pickled = path.read_bytes()
            require_small_tuples(pickled)
            metadata = _MetadataUnpickler(io.BytesIO(pickled)).load()  # a file would allocate claimed sizes
            if not isinstance(metadata, Metadata):
                raise ValueError("it has no metadata")
            are_indices = all(isinstance(index, MetadataIndex) for index in metadata.storage_data)
            if not are_indices or not all(isinstance(key, str) for key in metadata.state_dict_metadata):
                raise ValueError("its keys are no names")
            if outside := [
                each.relative_path
                for each in metadata.storage_data.values()
                if Path(each.relative_path).name != each.relative_path
            ]:
                raise ValueError(f"{outside[0]!r} is outside of the folder")
            for key, each in metadata.state_dict_metadata.items():
                if isinstance(each, TensorStorageMetadata):
                    self._require_chunks(key, each, metadata.storage_data)
            return metadata

    def _require_chunks(self, key: str, tensor: TensorStorageMetadata, stored: Mapping[MetadataIndex, Any]) -> None:
        """Raise ValueError if values of a tensor are in no file, which torch would leave uninitialised."""
        torch.empty(tensor.size, dtype=tensor.properties.dtype, device="meta")  # raises for sizes that no tensor has
        numbers = [math.prod(chunk.sizes) for chunk in tensor.chunks]
        if sum(numbers) != math.prod(tensor.size):
            raise ValueError(f"{key!r} has {sum(numbers):,} of {math.prod(tensor.size):,} values")
        for chunk, number in zip(tensor.chunks, numbers, strict=True):
            place = stored.get(MetadataIndex(key, chunk.offsets))
            if place is None or place.length < number * tensor.properties.dtype.itemsize:
                raise ValueError(f"a part of {key!r} is in no file")
            file = Path(self.path) / place.relative_path
            if file.stat().st_size < place.offset + place.length:
                raise ValueError(f"{place.relative_path} is shorter than it says")

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002
        return self.metadata


OPTIMIZER = re.compile(r"(\w+\.)?opt(im(izer)?s?)?\.")
STATE = re.compile(OPTIMIZER.pattern + r"state\.(?P<weight>.+)\.(?P<state>[^.]+)")


def _container(names: Iterable[str], states: Container[str]) -> str:
    """Return the keys above a model's names, such as "model." or "app.model." in PyTorch's tutorials."""
    within = ""
    while True:
        heads = {name.removeprefix(within).partition(".")[0] for name in names}
        longer = f"{within}{min(heads, default='')}."
        rest = [name.removeprefix(longer) for name in names]
        if len(heads) != 1 or not any(name in states or name.startswith("model.") for name in rest):
            return within
        within = longer


class DistributedCheckpoint(Checkpoint):
    """A checkpoint of `torch.distributed.checkpoint`, read by torch, a tensor at a time."""

    kind = "torch.distributed.checkpoint"

    def __init__(self, folder: Path, config: Mapping[str, Any]):
        super().__init__(folder, config)
        self._reader = _Reader(folder)
        metadata = self._reader.metadata
        files = {index.fqn: each.relative_path for index, each in metadata.storage_data.items()}
        self._keys: dict[tuple[str, str | None], str] = {}
        weights: dict[str, Listed] = {}
        for key, each in metadata.state_dict_metadata.items():
            if isinstance(each, TensorStorageMetadata):
                listed = Listed(tuple(each.size), str(each.properties.dtype).removeprefix("torch."), files.get(key, ""))
                if not OPTIMIZER.match(key):
                    weights[key] = listed
                elif (match := STATE.fullmatch(key)) and not match["weight"].isdigit():  # else by number, of no name
                    self.states.setdefault(match["weight"], {})[match["state"]] = listed
                    self._keys[match["weight"], match["state"]] = key
        within = _container(weights, self.states)
        for key, listed in weights.items():
            name = key.removeprefix(within)
            self.tensors[name], self._keys[name, None] = listed, key
        self._last: tuple[str, Tensor] = ("", torch.empty(0))

    def rows(self, name: str, state: str | None, begin: int, end: int) -> Tensor:
        key = self._keys[name, state]
        if self._last[0] != key:
            listed = self.tensors[name] if state is None else self.states[name][state]
            value = torch.empty(listed.shape, dtype=getattr(torch, listed.dtype))
            with reading(self.folder / listed.file, REMEDY), warnings.catch_warnings(action="ignore"):
                try:
                    load({key: value}, storage_reader=self._reader, no_dist=True)
                except CheckpointException as error:  # a BaseException
                    raise ValueError(str(next(iter(error.failures.values()))[0])) from None
            self._last = key, value
        return self._last[1][begin:end] if self._last[1].ndim else self._last[1]
