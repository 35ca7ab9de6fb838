"""A model with experts on several ranks, saved as ordinary transformers weights that any `from_pretrained` reads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from toolkit.errors import UserError
from toolkit.experts.hosts.loop.patches import Patches
from toolkit.experts.hosts.spreading.libraries import libraries
from toolkit.experts.layer.stack import only_names_are_read
from toolkit.experts.parallel.collectives import is_main, on_main
from toolkit.experts.parallel.ownership import ownership_of
from toolkit.experts.state.state_dict import Gatherer


def save_pretrained(model: nn.Module, folder: str | os.PathLike[str], **options: Any) -> None:
    """`model.save_pretrained(folder, **options)` with the experts of all ranks. A collective.

    A model of PEFT is saved as PEFT does: its adapters, without the base. Rank 0 gathers one tensor at a time and
    writes; it alone needs main memory for all of them. Raises UserError on every rank alike where the folder cannot be
    written.
    """
    inner: Any = getattr(model, "module", model)
    state, records = _gathered(inner)
    write_pretrained(inner, folder, state, records, **options)


def _gathered(inner: Any) -> tuple[dict[str, Tensor], list[Callable[[Path], None]]]:
    """Return what `save_pretrained` writes of a model that is not wrapped, on rank 0. A collective."""
    gather = Gatherer(inner)
    saves_base = not hasattr(inner, "peft_config")
    state: dict[str, Tensor] = {}
    for name, value in inner.state_dict(keep_vars=True).items():
        ownership = ownership_of(value)
        is_adapter_of_experts = ownership is not None and ownership.in_files != "stacked"
        if saves_base or "modules_to_save" in name or is_adapter_of_experts or isinstance(value, DTensor):
            gather(state, name, value)
        else:  # PEFT leaves out the experts of the base, and takes what every rank has
            state[name] = value.detach()
    return state, [record for library in libraries() if (record := library.record(inner)) is not None]


def save_as_called(
    model: Any,
    folder: str | os.PathLike[str],
    *,
    is_main_process: bool = True,
    state_dict: dict[str, Tensor] | None = None,
    **options: Any,
) -> None:
    """What `model.save_pretrained` is after `prepare`: `save_pretrained`, on every rank.

    With a `state_dict`, as `accelerator.get_state_dict` gives it, rank 0 writes that, and others do nothing. Raises
    UserError where it has the experts of one rank.
    """
    if state_dict is None:
        save_pretrained(model, folder, **options)
    elif is_main() and is_main_process:
        for name, parameter in model.named_parameters():
            ownership, value = ownership_of(parameter), state_dict.get(name)
            is_part = ownership is not None and ownership.groups.ep_size > 1
            if is_part and value is not None and len(value) == len(parameter):
                raise UserError(
                    f"state_dict: its {name!r} has the experts of one rank: leave it out, or pass "
                    "accelerator.get_state_dict(model), and call both on every rank."
                )
        _write(model, folder, state_dict, (), **options)


def push_as_called(model: Any, *args: Any, **options: Any) -> None:
    """What `model.push_to_hub` is after `prepare`: rank 0 uploads, with the experts of all ranks. A collective."""
    state, records = _gathered(model)

    def push() -> None:
        with Patches() as meanwhile:
            meanwhile.replace(model, "save_pretrained", partial(_write, model, state=state, records=records))
            type(model).push_to_hub(model, *args, **options)

    on_main(push)


def write_pretrained(
    model: Any,
    folder: str | os.PathLike[str],
    state: dict[str, Tensor],
    records: Iterable[Callable[[Path], None]] = (),
    **options: Any,
) -> None:
    """Have rank 0 write `state` as the type of `model` does, and `records` of it beside. A collective.

    Raises alike on every rank: UserError where the folder cannot be written, RuntimeError for any other failure.
    """
    write_on_main(folder, partial(_write, model, folder, state, records, **options))


def _write(
    model: Any,
    folder: str | os.PathLike[str],
    state: dict[str, Tensor],
    records: Iterable[Callable[[Path], None]],
    **options: Any,
) -> None:
    # Not the instance's own, which is a collective where experts are spread. PEFT reads names of the state dict of what
    # `modules_to_save` has, and takes the values of `state`.
    with only_names_are_read(model):
        type(model).save_pretrained(model, folder, state_dict=state, **options)
    for write_record in records:
        write_record(Path(folder))


def write_on_main(folder: str | os.PathLike[str], write: Callable[[], None]) -> None:
    """Have rank 0 `write` below the model's `folder`. A collective.

    Raises alike on every rank: UserError where the folder cannot be written, RuntimeError for any other failure.
    """
    try:
        on_main(write)
    except OSError as error:
        raise UserError(
            f"model folder {os.fspath(folder)} cannot be written ({error}): use one that can be."
        ) from error
