"""Checkpoints of a model and its optimizers: saved by all ranks, verified, and loadable under any layout of ranks.

    step-00000100/
        *.safetensors    weights and optimizer states, see `toolkit.experts.state.tensor_files`
        state.json       everything else, as plain JSON values
        manifest.json    format, step, world size, placement of rows, rows of each file, size and SHA-256 of files

`toolkit.experts.state.manifest` publishes a folder once it is complete. Safetensors and JSON only: loading executes no
code. Digests are compared first; the content of a checkpoint that verifies is trusted. Training loops without a `Run`
call `save` and `load`; `toolkit.checkpoint` writes the same files for a run.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

from toolkit.errors import UserError
from toolkit.experts.parallel.collectives import gather_objects, is_main, meet, on_main, rank, together, world_size
from toolkit.experts.parallel.optimizer_rows import refuse_foreign_parameters, unwrapped
from toolkit.experts.state import manifest
from toolkit.experts.state.random_states import random_states, restore_random_states
from toolkit.experts.state.tensor_files import (
    FileContents,
    SavedTensors,
    ToCPU,
    adopt_places,
    describe_places,
    describe_tied,
    first_not_finite,
    list_rows,
    load_model,
    load_optimizer,
    mismatches,
    named_states,
    on_cpu,
    targets,
    tensors_to_write,
)
from toolkit.progress_bar import progress

FORMAT = 1
PARAMETERS = "params"
"""Key of the parameters in an optimizer's group. state.json has their names."""

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
"""One optimizer, several for different parameters of a model, or none to load weights only."""

# --- saving ------------------------------------------------------------------------------------------------------


def save(folder: Path | str, model: nn.Module, optimizer: Optimizers, extra: dict[str, Any] | None = None) -> None:
    """Write a checkpoint from a training loop without a `Run`. A collective.

    An existing checkpoint is replaced once the new one is complete and verified.

    Args:
        folder: Path of the checkpoint.
        model: Each rank writes the rows of its experts; the main process writes the non-expert parameters.
        optimizer: One or several, whose states and settings, such as the learning rate, are saved with the weights.
        extra: Plain JSON values, which `load` returns.

    Raises:
        UserError: On every rank, if `folder` holds something else, a weight or an optimizer state is not finite, or an
            optimizer has a parameter outside the model.
        OSError: On every rank, if the checkpoint cannot be written. An existing one is unchanged.

    Example:
        >>> import tempfile, torch
        >>> from toolkit import experts
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> folder = tempfile.mkdtemp() + "/newest"
        >>> experts.save(folder, model, optimizer, {"epoch": 3})
        >>> experts.load(folder, model, optimizer)
        {'epoch': 3}
    """
    meet("save")
    final, optimizers = Path(folder).absolute(), _listed(model, optimizer)

    def check_folder() -> None:
        manifest.recover(final)
        if final.exists() and not (final / manifest.NAME).exists() and (not final.is_dir() or any(final.iterdir())):
            raise UserError(f"{folder}: is not a checkpoint and would be deleted. Save to another folder.")

    def check_finite() -> None:
        weights = ((name, p) for name, p in model.named_parameters() if p.requires_grad)
        states = (state for each in optimizers for state in named_states(model, each))
        if (name := first_not_finite(weights) or first_not_finite(states)) is not None:
            raise UserError(
                f"{folder}: is not written, because {name} is not finite. Continue from an earlier checkpoint, with a "
                "lower learning rate or a smaller max_norm."
            )

    on_main(check_folder)
    together(check_finite)
    content = {"training": extra or {}, "config": {}, "random": gather_objects(random_states())}
    begin_save(final, model, optimizers, content, step=None)(None)


def begin_save(
    final: Path,
    model: nn.Module,
    optimizer: Optimizers,
    content: dict[str, Any],
    *,
    step: int | None,
    make_free: Callable[[int], None] = lambda _: None,
    to_cpu: ToCPU = on_cpu,
    ranks: Sequence[int] | None = None,
) -> Callable[[dist.ProcessGroup | None], list[str]]:
    """Collect the contents of the checkpoint `final`, and free disk space for it. A collective.

    Args:
        final: Path of the checkpoint.
        model: Not wrapped.
        optimizer: One or several.
        content: For state.json: `training`, `config` and `random`, the states of each rank's generators or None.
        step: Optimizer steps done.
        make_free: Called with the number of bytes missing on the disk.
        to_cpu: Copies tensors, if training continues while they are written.
        ranks: Ranks that share the folder; the first makes it. Default: all.

    Returns:
        A collective of the group it is given, which atomically writes the checkpoint and returns the names of the files
        in this folder.

    Raises:
        OSError: On every rank, if the disk is full; also raised by the returned function.
    """
    makes_folder = is_main() if ranks is None else rank() == ranks[0]
    writing = final.with_name(manifest.WRITING + final.name)
    placement, tied = describe_places(model), describe_tied(model)
    optimizers = _listed(model, optimizer)
    files = tensors_to_write(model, optimizers, to_cpu)
    state = json.dumps(content | {"optimizer": _describe(model, optimizers)})
    needed = sum(together(lambda: sum(t.nbytes for tensors in files.values() for t in tensors.values())))

    def write(group: dist.ProcessGroup | None) -> list[str]:
        with _removed_on_failure(writing, needed, makes_folder):
            reports = together(lambda: _write(writing, files, state if is_main() else None), group)
            about = {
                "format": FORMAT,
                "step": step,
                "world_size": len(reports),
                "files": {name: seal for sealed, _ in reports for name, seal in sealed.items()},
                "rows": {name: rows for _, by_file in reports for name, rows in by_file.items()},
                "placement": placement,
                "tied": tied,
            }
            here = [name for at in ranks or range(len(reports)) for name in reports[at][0]]
            together(lambda: manifest.publish(writing, final, about, here) if makes_folder else None, group)
        return here

    with _removed_on_failure(writing, needed, makes_folder):
        together(lambda: _make_room(writing, needed, make_free) if makes_folder else None)
    return write


@contextmanager
def _removed_on_failure(writing: Path, needed: int, makes_folder: bool) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if makes_folder:
            shutil.rmtree(writing, ignore_errors=True)
        raise OSError(f"{error}; {needed:,} bytes needed in {writing.parent}") from error


def _write(
    writing: Path, files: FileContents, state: str | None
) -> tuple[dict[str, Any], dict[str, dict[str, list[int]]]]:
    """Write this rank's files; returns their seals, and which rows of which parameter each file holds."""
    seals = {}
    for name, tensors in progress(files.items(), "saving checkpoint"):
        save_file(tensors, writing / name)
        seals[name] = manifest.seal(writing / name)
    if state is not None:
        (writing / manifest.STATE).write_text(state, encoding="utf-8")
        seals[manifest.STATE] = manifest.seal(writing / manifest.STATE)
    return seals, list_rows(files)


def _make_room(writing: Path, needed: int, make_free: Callable[[int], None]) -> None:
    """Make the empty folder `writing` on a disk with `needed` free bytes, after `make_free` if there are fewer."""
    writing.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(writing, ignore_errors=True)
    if (missing := needed - shutil.disk_usage(writing.parent).free) > 0:
        make_free(missing)
        if needed > (free := shutil.disk_usage(writing.parent).free):
            raise OSError(f"the disk is full, with {free:,} bytes free")
    writing.mkdir()


# --- loading -----------------------------------------------------------------------------------------------------


def load(folder: Path | str, model: nn.Module, optimizer: Optimizers) -> dict[str, Any]:
    """Verify a checkpoint of `save` or a `Trainer`, and load it under any number of ranks. A collective.

    With the same world size and slots, experts are placed where they were saved. With the same world size, random
    states are restored.

    Args:
        folder: Path of the checkpoint.
        model: Takes its weights, each rank the rows of its experts.
        optimizer: One or several, which take their states and settings, such as the learning rate; `()` for none.

    Returns:
        The `extra` that was saved.

    Raises:
        UserError: On every rank, before anything is changed, if the checkpoint is missing, damaged or does not fit.
    """
    meet("load")
    path = Path(folder).absolute()

    def check() -> None:
        manifest.recover(path)
        if damage := manifest.find_damage(path):
            raise UserError(f"{folder}: cannot be loaded, because {damage}. Use another checkpoint.")

    on_main(check)
    saved = read(path)
    load_tensors(saved, model, optimizer)
    if len(random := saved.state.get("random") or ()) == world_size():  # a Trainer needs none
        restore_random_states(random[rank()])
    training: dict[str, Any] = saved.state["training"]
    return training


class Saved(NamedTuple):
    """A checkpoint that verifies, without its tensors."""

    path: Path
    about: dict[str, Any]
    """The manifest of the checkpoint."""
    state: dict[str, Any]
    """The content of its state.json."""


def read(path: Path) -> Saved:
    """Read the checkpoint at `path`. A collective. Raises UserError for another format."""
    about, state = on_main(lambda: (manifest.read_manifest(path), manifest.read_state(path)))
    if about["format"] != FORMAT:
        raise UserError(
            f"{path}: has format {about['format']}, and this version reads format {FORMAT}. Use the version that "
            "wrote it, or another folder."
        )
    return Saved(path, about, state)


def load_tensors(saved: Saved, model: nn.Module, optimizer: Optimizers, found: Sequence[str] = ()) -> None:
    """Load weights, optimizer states and the settings of parameter groups. A collective.

    Args:
        saved: The checkpoint.
        model: Gets the weights.
        optimizer: Gets its states and settings.
        found: Mismatches between the checkpoint and the run, each as half a sentence.

    Raises:
        UserError: On every rank, before anything is changed, for `found` and for mismatches of model and optimizer.
    """
    optimizers = _listed(model, optimizer)
    with SavedTensors() as tensors:

        def compare() -> tuple[list[str], set[str]]:
            tensors.open(saved.path, saved.about["files"])
            return mismatches(model, tensors), {weight for weight, _ in targets(model)}

        answers = together(compare)
        lines = [*found]
        then, now = saved.state["optimizer"], _names(optimizers)
        if optimizers and now != then["name"]:
            lines.append(f"it was made with the optimizer {then['name']} and this run has {now}")
        lines += dict.fromkeys(line for on_rank, _ in answers for line in on_rank)
        strangers = {*tensors.weights, *tensors.states} - {weight for _, wanted in answers for weight in wanted}
        lines += [f"it holds {weight!r}, which the model lacks" for weight in sorted(strangers)]
        settings, differ = _saved_settings(model, optimizers, then.get("groups", ()))
        lines += differ
        if lines:
            more = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
            raise UserError(
                f"{saved.path}: does not fit: {lines[0]}{more}. Use the model, optimizer and settings that it was made "
                "with."
            )
        adopt_places(model, saved.about["placement"])
        load_model(model, tensors)
        for each in optimizers:
            load_optimizer(model, each, tensors)
    for group, values in zip(_groups(optimizers), settings, strict=True):  # `load_optimizer` has made new groups
        for name, value in values.items():
            if isinstance(group.get(name), Tensor):
                group[name].fill_(value)
            else:
                group[name] = tuple(value) if isinstance(value, list) else value
    scaler = _scaler(optimizers)
    if scaler is not None and then["scaler"] is not None:
        scaler.load_state_dict(then["scaler"])


def _listed(model: nn.Module, optimizers: Optimizers) -> list[torch.optim.Optimizer]:
    """Return them as a list. Raises UserError for an optimizer with a parameter outside the model."""
    found = list(optimizers) if isinstance(optimizers, Sequence) else [optimizers]
    for each in found:
        refuse_foreign_parameters(model, each)
    return found


# --- settings of optimizers --------------------------------------------------------------------------------------


def _describe(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    scaler = _scaler(optimizers)
    return {
        "name": _names(optimizers),
        "scaler": None if scaler is None else scaler.state_dict(),
        "groups": [
            {key: v.item() if isinstance(v, Tensor) else v for key, v in group.items() if _is_plain(v)}
            | {PARAMETERS: [names[parameter] for parameter in group[PARAMETERS]]}
            for group in _groups(optimizers)
        ],
    }


def _saved_settings(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], saved_groups: Sequence[dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the saved settings of each parameter group, found by the names of its parameters, and mismatches.

    Groups may be in another order, and divided differently: a model whose experts are sharded has other groups than the
    same model on one rank.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    saved: dict[str, dict[str, Any]] = {}
    for group in saved_groups:
        settings = {key: value for key, value in group.items() if key != PARAMETERS}
        saved |= dict.fromkeys(group[PARAMETERS], settings)
    found, lines = [], []
    for group in _groups(optimizers):
        known = [name for parameter in group[PARAMETERS] if (name := names[parameter]) in saved]
        other = next((name for name in known if saved[name] != saved[known[0]]), None)
        if other is not None:
            lines.append(
                f"its optimizer has other settings for {known[0]!r} than for {other!r}, and this one has equal"
            )
        found.append(saved[known[0]] if known else {})
    return found, lines


def _names(optimizers: Sequence[torch.optim.Optimizer]) -> str:
    return ", ".join(type(unwrapped(each)).__name__ for each in optimizers)


def _scaler(optimizers: Sequence[torch.optim.Optimizer]) -> torch.amp.GradScaler | None:
    """Return the loss scaling of fp16, which Accelerate keeps with each optimizer."""
    return next((scaler for each in optimizers if (scaler := getattr(each, "scaler", None)) is not None), None)


def _groups(optimizers: Sequence[torch.optim.Optimizer]) -> list[dict[str, Any]]:
    return [group for each in optimizers for group in unwrapped(each).param_groups]


def _is_plain(value: object) -> bool:
    """Whether a setting can be written as JSON: numbers, also as tensors, text, and tuples of them."""
    if isinstance(value, list | tuple):
        return all(isinstance(each, int | float | str | None) for each in value)
    return isinstance(value, int | float | str | None) or (isinstance(value, Tensor) and value.numel() == 1)
