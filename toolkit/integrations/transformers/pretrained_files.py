"""Saving a model with sharded experts as ordinary transformers weights that any `from_pretrained` reads."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from toolkit.errors import UserError
from toolkit.experts.layer.stack import expert_stacks, only_names_are_read
from toolkit.experts.parallel.collectives import is_main, on_main
from toolkit.experts.parallel.ownership import ownership_of
from toolkit.experts.sharding.libraries import libraries
from toolkit.experts.state.manifest import sync
from toolkit.experts.state.state_dict import Gatherer
from toolkit.integrations.accelerate.patches import Patches
from toolkit.integrations.transformers.language_models import no_progress_bar
from toolkit.integrations.transformers.quantization import unpack_state
from toolkit.progress_bar import progress

MOST_IN_A_FILE = "5GB"
"""Default of `max_shard_size`."""


class Tensors(NamedTuple):
    """Tensors that are written together, because a tensor in a file can hold several."""

    size: int
    """Unsharded size in bytes, the same on every rank."""
    gather: Callable[[dict[str, Tensor]], None]
    """Adds them to a state dict of rank 0. A collective."""


def save_pretrained(model: nn.Module, folder: str | os.PathLike[str], **options: Any) -> None:
    """Call `model.save_pretrained(folder, **options)` with the experts of all ranks. A collective.

    PEFT models save only adapters, without the base. Rank 0 gathers and writes a few layers of experts at a time, at
    most half of `max_shard_size` (5 GB) or one layer, because transformers can copy them as it names each expert's
    tensors: the peak main memory is `max_shard_size`, or twice a layer. Old files in the folder are replaced once the
    model is written completely. Raises UserError on every rank if the folder cannot be written.
    """
    inner: Any = getattr(model, "module", model)
    write_pretrained(inner, folder, _tensors(inner), _records(inner), **options)


def _tensors(inner: Any) -> list[Tensors]:
    """Return tensors that `save_pretrained` writes of an unwrapped model: experts by layer, after the rest."""
    gather = Gatherer(inner)
    saves_base = not hasattr(inner, "peft_config")
    stacks = expert_stacks(inner).values()
    adapters = {p for stack in stacks for key, p in stack.parameters.items() if stack.in_files(key) != "stacked"}

    def gather_all(values: Mapping[str, Tensor], state: dict[str, Tensor]) -> None:
        for name, value in values.items():
            if saves_base or "modules_to_save" in name or value in adapters or isinstance(value, DTensor):
                gather(state, name, value)
            else:  # PEFT omits the base experts; every rank has the other values
                state[name] = value.detach()
        unpack_state(inner, state)

    values = inner.state_dict(keep_vars=True)
    return by_layer(values, gather, gather_all) if saves_base else [Tensors(0, partial(gather_all, values))]


def by_layer(
    values: Mapping[str, Tensor], gatherer: Gatherer, gather: Callable[[Mapping[str, Tensor], dict[str, Tensor]], None]
) -> list[Tensors]:
    """Return `values`, by name, as the experts of each layer after all others; `gather` adds some to a state dict."""
    layers: dict[str, dict[str, Tensor]] = {"": {}}
    for name, value in values.items():
        layers.setdefault("" if ownership_of(value) is None else name.rpartition(".")[0], {})[name] = value
    return [Tensors(sum(map(gatherer.size_of, each.values())), partial(gather, each)) for each in layers.values()]


def _records(inner: Any) -> list[Callable[[Path], None]]:
    """Return writers of libraries' additional files. A collective."""
    return [record for library in libraries() if (record := library.record(inner)) is not None]


def save_as_called(
    model: Any,
    folder: str | os.PathLike[str],
    *,
    is_main_process: bool = True,
    state_dict: dict[str, Tensor] | None = None,
    **options: Any,
) -> None:
    """Replace `model.save_pretrained` after `prepare`, on every rank.

    With a `state_dict` from `accelerator.get_state_dict`, rank 0 writes it, and other ranks do nothing. Raises
    UserError if it has the experts of one rank.
    """
    if state_dict is None:
        save_pretrained(model, folder, **options)
    elif is_main() and is_main_process:
        for name, parameter in model.named_parameters():
            ownership, value = ownership_of(parameter), state_dict.get(name)
            is_part = ownership is not None and ownership.groups.ep_size > 1
            if is_part and value is not None and len(value) == len(parameter):
                raise UserError(
                    f"state_dict: its {name!r} has the experts of one rank. Leave it out, or pass "
                    "accelerator.get_state_dict(model), and call both on every rank."
                )
        _replace(Path(folder), partial(_write, model, state_dict, (), options))


def push_as_called(model: Any, *args: Any, **options: Any) -> None:
    """Replace `model.push_to_hub` after `prepare`: rank 0 gathers all experts in main memory, and uploads. A
    collective."""
    state, records = _gathered(_tensors(model)), _records(model)

    def save(folder: str, **saving: Any) -> None:
        _replace(Path(folder), partial(_write, model, state, records, saving))

    def push() -> None:
        with Patches() as meanwhile:
            meanwhile.replace(model, "save_pretrained", save)
            type(model).push_to_hub(model, *args, **options)

    on_main(push)


def write_pretrained(
    model: Any,
    folder: str | os.PathLike[str],
    tensors: Iterable[Tensors],
    records: Iterable[Callable[[Path], None]] = (),
    **options: Any,
) -> None:
    """Have rank 0 write `tensors` as the type of `model` does, and then call `records`. A collective.

    Raises on every rank: UserError if the folder cannot be written, RuntimeError for any other failure.
    """
    from transformers.utils.hub import convert_file_size_to_int

    # Files of a variant have names that `_join_parts` does not make, and parts of a model cannot be uploaded.
    is_one = "variant" in options or options.get("push_to_hub")
    limit = math.inf if is_one else convert_file_size_to_int(options.get("max_shard_size", MOST_IN_A_FILE))
    parts = _in_parts(tensors, limit / 2)
    if len(parts) == 1:
        write_on_main(folder, partial(_write, model, _gathered(parts[0]), records, options))
        return
    scratch = _scratch(Path(folder))
    _on_main(folder, partial(_make_empty, scratch))
    try:
        for number, part in enumerate(progress(parts, "saving parts")):
            state = _gathered(part)
            _on_main(folder, partial(_write, model, state, (), options, scratch / f"{number:05d}"))
        _on_main(folder, partial(_join_parts, scratch, records))
        _on_main(folder, partial(_move, scratch / "00000", Path(folder)))
    finally:
        if is_main():
            shutil.rmtree(scratch, ignore_errors=True)


def _in_parts(tensors: Iterable[Tensors], limit: float) -> list[list[Tensors]]:
    """Group consecutive tensors to at most `limit` bytes; a larger one is its own group."""
    parts: list[list[Tensors]] = [[]]
    for each in tensors:
        if parts[-1] and sum(other.size for other in parts[-1]) + each.size > limit:
            parts.append([])
        parts[-1].append(each)
    return parts


def _gathered(part: Iterable[Tensors]) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    for each in progress(part, "gathering layers"):
        each.gather(state)
    return state


def _scratch(folder: Path) -> Path:
    """Return a temporary folder for files of `folder`, on its disk."""
    return folder / ".writing"


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _join_parts(scratch: Path, records: Iterable[Callable[[Path], None]]) -> None:
    """Join the models in the folders below `scratch` into the first folder, with an index."""
    first, *_ = parts = sorted(scratch.iterdir())
    files = [file for part in parts for file in sorted(part.glob("*.safetensors"))]
    stem = _stem(files[0].name)
    weight_map: dict[str, str] = {}
    size = 0
    for number, file in enumerate(files, 1):
        name = f"{stem}-{number:05d}-of-{len(files):05d}.safetensors"
        begins, end = begins_of_tensors(file), file.stat().st_size
        weight_map |= dict.fromkeys(begins, name)
        size += end - min(begins.values(), default=end)
        file.rename(first / name)
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (first / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    for write_record in records:
        write_record(first)


def begins_of_tensors(path: str | os.PathLike[str]) -> dict[str, int]:
    """Return the first byte of each tensor of a safetensors file."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    return {name: 8 + size + of["data_offsets"][0] for name, of in header.items() if name != "__metadata__"}


def _stem(name: str) -> str:
    """Return the stem of a weight file, `model` for `model-00001-of-00003.safetensors`; empty for other files."""
    match = re.fullmatch(r"(.+?)(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?", name)
    return match[1] if match else ""


def _replace(folder: Path, write: Callable[[Path], None]) -> None:
    """Have `write` fill a new folder, and then move its files to `folder`, replacing existing ones."""
    scratch = _scratch(folder)
    new = scratch / os.path.basename(os.path.abspath(folder))  # of which transformers makes the name of an upload
    try:
        _make_empty(new)
        for card in folder.glob("README.md"):  # to which PEFT adds
            shutil.copy(card, new)
        write(new)
        _move(new, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _move(new: Path, folder: Path) -> None:
    """Move the files below `new` to `folder`, replacing existing ones, and delete other weights of an older model.

    If the process is killed, `folder` has the older model, the new model, or no index: never an index of both."""
    files = sorted(file for file in new.rglob("*") if file.is_file())
    for file in files:
        sync(file)  # a disk elsewhere says only now that it is full
    names = [file.relative_to(new) for file in files]
    indices = [name for name in names if name.name.endswith(".index.json")]
    if any(_stem(name.name) and name not in indices and (folder / name).exists() for name in names):
        for name in indices:
            (folder / name).unlink(missing_ok=True)
    for name in sorted(names, key=indices.__contains__):  # an index last
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (new / name).replace(folder / name)
    stems = {_stem(name.name) for name in names} - {""}
    for path in folder.iterdir():
        if _stem(path.name) in stems and Path(path.name) not in names:
            path.unlink()


def _write(
    model: Any,
    state: dict[str, Tensor],
    records: Iterable[Callable[[Path], None]],
    options: Mapping[str, Any],
    folder: Path,
) -> None:
    # Not the instance's own, a collective for sharded experts. For `modules_to_save`, PEFT reads only the names of
    # their state dict, and takes the values of `state`.
    with only_names_are_read(model), no_progress_bar():
        type(model).save_pretrained(model, folder, state_dict=state, **options)
    for write_record in records:
        write_record(folder)


def write_on_main(folder: str | os.PathLike[str], write: Callable[[Path], None]) -> None:
    """Have rank 0 `write` files of the model's `folder`: to a temporary folder, whose files replace existing ones once
    all are written. A collective.

    Raises on every rank: UserError if the folder cannot be written, RuntimeError for any other failure.
    """
    _on_main(folder, partial(_replace, Path(folder), write))


def _on_main(folder: str | os.PathLike[str], work: Callable[[], None]) -> None:
    try:
        on_main(work)
    except OSError as error:
        raise UserError(
            f"{os.fspath(folder)}: cannot be written ({error}). Make room, or use another folder."
        ) from error
