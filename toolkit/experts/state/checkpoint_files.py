"""Models and optimizers in files: saved by all ranks, verified, and loadable under another layout of ranks.

    step-00000100/
        *.safetensors    weights and optimizer states, see `toolkit.experts.state.tensor_files`
        state.json       whatever else is saved, as plain JSON values
        manifest.json    format, step, world size, placement of rows, which file holds which, size and SHA-256 of files

`toolkit.experts.state.manifest` writes a folder so that it is complete or not there. Safetensors and JSON only: loading
executes no code. Loops of one's own call `save` and `load`; `toolkit.checkpoint` writes the same files for a run.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
from pydantic import BaseModel, Field, StrictStr, ValidationError
from safetensors.torch import save_file
from torch import Tensor, nn

from toolkit.errors import UserError, one_line
from toolkit.experts.parallel.collectives import gather_objects, is_main, on_main, rank, together, world_size
from toolkit.experts.parallel.optimizer_rows import refuse_strangers, unwrapped
from toolkit.experts.parallel.ownership import ownership_of
from toolkit.experts.state import manifest
from toolkit.experts.state.random_states import (
    RandomStates,
    oddity_of_random_states,
    random_states,
    restore_random_states,
)
from toolkit.experts.state.tensor_files import (
    FileContents,
    SavedTensors,
    ToCPU,
    adopt_places,
    describe_places,
    describe_tensor,
    describe_tied,
    files_to_write,
    first_not_finite,
    list_rows,
    load_model,
    load_optimizer,
    named_states,
    on_cpu,
    targets,
)

FORMAT = 1
STATE = "state.json"
PARAMETERS = "params"
"""What torch calls the parameters of an optimizer's group; state.json has their names."""

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
"""One, or several that have different parameters of a model; none where only weights are wanted."""

# --- saving ------------------------------------------------------------------------------------------------------


def save(folder: Path | str, model: nn.Module, optimizer: Optimizers, extra: dict[str, Any] | None = None) -> None:
    """Writes a checkpoint from a loop that has no `Run`. A collective.

    A checkpoint that is there already is replaced once the new one is complete and verified.

    Args:
        folder: Becomes the checkpoint.
        model: Each rank writes the rows of its experts; the main process writes what all have.
        optimizer: One or several, whose states and settings, such as the learning rate, are written beside the rows.
        extra: Plain JSON values, which `load` returns.

    Raises:
        UserError: On every rank, with the former one untouched, where it cannot be written, where a weight or an
            optimizer state is not finite, and for an optimizer with a parameter that is none of the model's.
    """
    final, optimizers = Path(folder).absolute(), _listed(model, optimizer)

    def prepare() -> None:
        manifest.recover(final)
        if final.exists() and not (final / manifest.NAME).exists() and (not final.is_dir() or any(final.iterdir())):
            raise UserError(f"{folder} holds something that is no checkpoint: save to another folder.")

    def refuse_infinities() -> None:
        weights = ((name, p) for name, p in model.named_parameters() if p.requires_grad)
        states = (state for each in optimizers for state in named_states(model, each))
        if (name := first_not_finite(weights) or first_not_finite(states)) is not None:
            raise UserError(
                f"checkpoint {folder} is not written, because {name} is not finite: go on from the one before, with a "
                "lower learning rate or smaller max_norm."
            )

    try:
        on_main(prepare)
        together(refuse_infinities)
        state, random = extra or {}, gather_objects(random_states())
        begin_save(final, model, optimizers, state=state, config={}, step=None, random=random)(None)
    except OSError as error:
        raise UserError(f"checkpoint {folder} could not be written: {error}: make room, or save elsewhere.") from None


def begin_save(
    final: Path,
    model: nn.Module,
    optimizer: Optimizers,
    *,
    state: dict[str, Any],
    config: dict[str, Any],
    step: int | None,
    random: list[dict[str, Any]] | None = None,
    make_free: Callable[[int], None] = lambda _: None,
    to_cpu: ToCPU = on_cpu,
    ranks: Sequence[int] | None = None,
) -> Callable[[dist.ProcessGroup | None], list[str]]:
    """Make room for the checkpoint `final`, and return what writes it, whole or not at all, and returns the names of
    its files. Both are collectives, and raise OSError on every rank.

    `make_free` is called with the number of bytes that the disk lacks. `ranks` are those that share the folder; the
    first of them makes it. `random` has the states of each rank's generators.
    """
    makes_folder = is_main() if ranks is None else rank() == ranks[0]
    writing = final.with_name(manifest.WRITING + final.name)
    placement, tied = describe_places(model), describe_tied(model)
    optimizers = _listed(model, optimizer)
    files = files_to_write(model, optimizers, to_cpu)
    content = {"training": state, "config": config, "optimizer": _describe(model, optimizers), "random": random}
    content = copy.deepcopy(content)
    needed = sum(together(lambda: sum(t.nbytes for tensors in files.values() for t in tensors.values())))

    def write(group: dist.ProcessGroup | None) -> list[str]:
        with _removed_on_failure(writing, needed, makes_folder):
            reports = together(lambda: _write(writing, files, content if is_main() else None), group)
            about = {
                "format": FORMAT,
                "step": step,
                "world_size": len(reports),
                "config_digest": manifest.digest(config),
                "files": {name: seal for sealed, _ in reports for name, seal in sealed.items()},
                "rows": {name: rows for _, by_file in reports for name, rows in by_file.items()},
                "placement": placement,
                "tied": tied,
            }
            here = [name for at in ranks or range(len(reports)) for name in reports[at][0]]
            together(lambda: manifest.publish(writing, final, about, here) if makes_folder else None, group)
        return here

    with _removed_on_failure(writing, needed, makes_folder):
        together(lambda: make_room(writing, needed, make_free) if makes_folder else None)
    return write


@contextmanager
def _removed_on_failure(writing: Path, needed: int, makes_folder: bool) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if makes_folder:
            shutil.rmtree(writing, ignore_errors=True)
        folder = writing.parent
        raise OSError(f"{error}; {needed:,} bytes needed, {free_bytes(folder):,} free in {folder}") from error


def _write(
    writing: Path, files: FileContents, content: dict[str, Any] | None
) -> tuple[dict[str, Any], dict[str, dict[str, list[int]]]]:
    """Write this rank's files; returns their seals, and which rows of which parameter each holds."""
    for name, tensors in files.items():
        save_file(tensors, writing / name)
    names = list(files)
    if content is not None:
        manifest.write_canonical(writing / STATE, content)
        names.append(STATE)
    return {name: manifest.seal(writing / name) for name in names}, list_rows(files)


def make_room(writing: Path, needed: int, make_free: Callable[[int], None]) -> None:
    """Make the empty folder `writing` on a disk with `needed` free bytes. Raises OSError where `make_free`, which is
    called with the number that it lacks, does not help."""
    writing.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(writing, ignore_errors=True)
    if (missing := needed - free_bytes(writing.parent)) > 0:
        make_free(missing)
    if needed > free_bytes(writing.parent):
        raise OSError("the disk is full")
    writing.mkdir()


def free_bytes(folder: Path) -> int:
    """Bytes that can be written where `folder` is or will be."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


# --- loading -----------------------------------------------------------------------------------------------------


def load(
    folder: Path | str,
    model: nn.Module,
    optimizer: Optimizers,
    oddity: Callable[[dict[str, Any]], str | None] = lambda _: None,
) -> dict[str, Any]:
    """Verifies what `save` (or a `Trainer`) wrote, and loads it under any number of ranks. A collective.

    On as many ranks with as many slots experts are placed where they were saved, and on as many ranks random states are
    those that were saved.

    Args:
        folder: The checkpoint.
        model: Takes its weights, each rank those of its experts.
        optimizer: One or several, which take their states and settings, such as the learning rate; `()` leaves them.
        oddity: Says why the `extra` that was saved cannot be used, as half a sentence, or returns None.

    Returns:
        The `extra` that was saved.

    Raises:
        UserError: On every rank, before anything is changed, where the checkpoint is missing, damaged or does not fit.
    """
    path = Path(folder).absolute()

    def check() -> None:
        manifest.recover(path)
        if damage := manifest.find_damage(path):
            raise UserError(f"checkpoint {folder} cannot be loaded: {damage}: use another.")

    on_main(check)
    optimizers = _listed(model, optimizer)

    def differences(saved: dict[str, Any]) -> list[str]:
        then, now = saved["optimizer"].get("groups") or (), _groups(optimizers)
        lines = [oddity(saved["training"])]
        if then and len(now) not in (0, len(then)):
            lines.append(f"it has {len(then)} parameter groups and the optimizer {len(now)}")
        for number, (settings, group) in enumerate(zip(then, now, strict=False)):
            plain = {key: _plain(value) for key, value in group.items() if key != PARAMETERS}
            if odd := other_type(settings, plain, f"optimizer.groups.{number}"):
                lines.append(f"it has {odd}")
            elif settings.get("lr") is None and plain.get("lr") is not None:
                lines.append(f"it has no optimizer.groups.{number}.lr")
        if (random := states_here(saved)) is not None:
            lines.append(oddity_of_random_states(random))
        return list(filter(None, lines))

    def states_here(saved: dict[str, Any]) -> dict[str, Any] | None:
        random = saved.get("random")  # a Trainer needs none
        return random[rank()] if random is not None and len(random) == world_size() else None

    remedy = "build the model that it was made with, and its optimizer, or load another"
    saved = load_verified(path, model, optimizer, remedy=remedy, differences=differences)
    for group, settings in zip(_groups(optimizers), saved["optimizer"].get("groups") or (), strict=False):
        for name, value in settings.items():
            if name == PARAMETERS:
                continue
            if isinstance(group.get(name), Tensor):
                group[name].fill_(value)
            else:
                group[name] = tuple(value) if isinstance(value, list) else value
    if (random := states_here(saved)) is not None:
        restore_random_states(random)
    training: dict[str, Any] = saved["training"]
    return training


def load_verified(
    path: Path,
    model: nn.Module,
    optimizer: Optimizers,
    *,
    remedy: str,
    differences: Callable[[dict[str, Any]], list[str]] = lambda _: [],
) -> dict[str, Any]:
    """Loads the verified checkpoint at `path`; returns all that was saved with it. A collective.

    Settings of the optimizer stay its own.

    Args:
        path: The folder.
        model: Gets the weights.
        optimizer: Gets its states.
        remedy: What to do where the checkpoint does not fit, as the end of a sentence.
        differences: Says what in what was saved forbids to load it, each as half a sentence.

    Raises:
        UserError: On every rank, before anything is changed, where the checkpoint does not fit.
    """
    about, saved = on_main(lambda: read(path))
    optimizers = _listed(model, optimizer)
    with SavedTensors() as tensors:

        def compare() -> tuple[list[str], set[str]]:
            tensors.open(path, about["files"])
            lines = differences(saved)
            return lines + _misfits(saved, model, optimizers, tensors), {weight for weight, _ in targets(model)}

        try:
            answers = together(compare)
        except OSError as error:
            raise UserError(
                f"checkpoint {path} cannot be read ({error}): every machine must see this folder."
            ) from None
        strangers = tensors.known() - {weight for _, wanted in answers for weight in wanted}
        lines = [line for found, _ in answers for line in found] + [
            f"it holds {weight!r}" for weight in sorted(strangers)
        ]
        if lines := list(dict.fromkeys(lines)):
            more = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
            raise UserError(f"checkpoint {path} does not fit this run: {lines[0]}{more}: {remedy}.")
        adopt_places(model, about.get("placement", {}))
        load_model(model, tensors)
        for each in optimizers:
            load_optimizer(model, each, tensors)
    if optimizers and saved["optimizer"]["scaler"] is not None:
        optimizers[0].scaler.load_state_dict(saved["optimizer"]["scaler"])  # type: ignore[attr-defined]
    return saved


_Setting = bool | int | float | str | None


class _Group(BaseModel, strict=True, extra="allow"):
    """The settings of a parameter group; those of the optimizer that takes them tell more of their types."""

    __pydantic_extra__: dict[str, _Setting | list[_Setting]]
    params: list[str]
    lr: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None


class _Optimizer(BaseModel):
    name: StrictStr
    scaler: dict[str, Any] | None
    groups: list[_Group] | None = None


class _Content(BaseModel):
    """The types of what state.json holds; whoever saved `training` knows more of it."""

    training: dict[str, Any]
    config: dict[str, Any]
    optimizer: _Optimizer
    random: list[RandomStates] | None = None


def read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The manifest and the state in `path`. Raises UserError for another format, and where one cannot be read."""
    about = read_about(path)
    try:
        return about, read_state(path)
    except (OSError, ValueError) as error:
        raise UserError(f"checkpoint {path} cannot be loaded: {one_line(error)}: use another.") from None


def read_about(path: Path) -> dict[str, Any]:
    """The manifest in `path`. Raises UserError for another format."""
    about = manifest.read_manifest(path)
    if about["format"] != FORMAT:
        raise UserError(
            f"checkpoint {path} has format {about['format']} and this version reads format {FORMAT}: "
            "use the version that wrote it, or another folder."
        )
    return about


def read_state(path: Path) -> dict[str, Any]:
    """The state in `path`. Raises ValueError or OSError where it cannot be read, or has other types."""
    saved = manifest.read_canonical(path / STATE)
    check_types(_Content, saved)
    return saved


def check_types(model: type[BaseModel], value: Any, field: str = "") -> None:
    """Raise ValueError with the first thing in `value`, a part of state.json, that `model` does not take."""
    try:
        model.model_validate(value)
    except ValidationError as error:
        found = error.errors(include_url=False)[0]
        place = ".".join(filter(None, [field, *map(str, found["loc"])])) or "all of it"
        if found["type"] == "missing":
            raise ValueError(f"{STATE} has no {place}") from None
        raise ValueError(f"{STATE} has {place}={str(found['input'])[:40]}: {found['msg']}") from None


def other_type(saved: Any, now: Any, name: str) -> str | None:
    """The first value of `saved` that is of another type than the same one `now`, with the name of both; None says that
    nothing is known yet, and keys that only one of them has are not compared."""
    if isinstance(saved, dict) and isinstance(now, dict):
        both = (other_type(saved[key], now[key], f"{name}.{key}") for key in saved.keys() & now.keys())
        return next(filter(None, both), None)
    if saved is None or now is None:
        return None
    kinds: tuple[type, ...] = (int, float) if type(now) in (int, float) else (type(now),)
    if isinstance(now, list | tuple):
        kinds = (list, tuple)
    if type(saved) not in kinds:
        return f"{name}={saved!r}, which is a {type(now).__name__}"
    if isinstance(now, tuple):  # of fixed length, as betas
        if len(saved) != len(now):
            return f"{name}={saved!r}, which has {len(now)} values"
        return next(filter(None, (other_type(*pair, name) for pair in zip(saved, now, strict=True))), None)
    return None


def _misfits(
    saved: dict[str, Any], model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], tensors: SavedTensors
) -> list[str]:
    """Why this rank's model and optimizer cannot use the checkpoint, each reason as half a sentence."""
    lines = []
    then, now = saved["optimizer"], _describe(model, optimizers)
    if not optimizers:
        now = then
    if then["name"] != now["name"]:
        lines.append(f"it was made with the optimizer {then['name']} and this run has {now['name']}")
    if (then["scaler"] is None) != (now["scaler"] is None):
        lines.append(f"it was made {'without' if then['scaler'] is None else 'with'} fp16's loss scaling")
    elif odd := other_type(then["scaler"], now["scaler"], "optimizer.scaler"):
        lines.append(f"it has {odd}")
    for name in (name for name, parameter in model.named_parameters() if ownership_of(parameter) is not None):
        if len({frozenset(tensors.states.get(f"{name}/{row_id}", ())) for row_id in tensors.rows_of(name)}) > 1:
            lines.append(f"its rows of {name!r} have different optimizer states")
    # Their kernels go through a state as far as the weight goes, whatever its shape.
    groups = [group for each in (then, now) for group in each.get("groups") or ()]
    fused = {name for group in groups if group.get("fused") for name in group[PARAMETERS]}
    for weight, target in targets(model):
        here = describe_tensor(tuple(target.shape), target.dtype)
        if weight not in tensors.weights:
            lines.append(f"it lacks {weight!r}")
        elif (there := tensors.describe(weight)) != here:
            lines.append(f"its {weight!r} is {there} and this run's is {here}")
        else:
            is_fused = weight in fused or weight.rpartition("/")[0] in fused
            if odd := tensors.oddity(weight, target.shape, is_fused=is_fused):
                lines.append(odd)
    return lines


def _listed(model: nn.Module, optimizers: Optimizers) -> list[torch.optim.Optimizer]:
    """Returns them as a list. Raises UserError for one with a parameter that is none of the model's."""
    found = list(optimizers) if isinstance(optimizers, Sequence) else [optimizers]
    for each in found:
        refuse_strangers(model, each)
    return found


def _describe(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    scaler = next((scaler for each in optimizers if (scaler := getattr(each, "scaler", None)) is not None), None)
    return {
        "name": ", ".join(type(unwrapped(each)).__name__ for each in optimizers),
        "scaler": None if scaler is None else scaler.state_dict(),
        "groups": [
            {key: _plain(value) for key, value in group.items() if _is_plain(value)}
            | {PARAMETERS: [names[parameter] for parameter in group[PARAMETERS]]}
            for group in _groups(optimizers)
        ],
    }


def _groups(optimizers: Sequence[torch.optim.Optimizer]) -> list[dict[str, Any]]:
    return [group for each in optimizers for group in unwrapped(each).param_groups]


def _is_plain(value: object) -> bool:
    """Whether a setting of an optimizer can be written: numbers, also as tensors, text, and tuples of them."""
    if isinstance(value, list | tuple):
        return all(isinstance(each, int | float | str | None) for each in value)
    return isinstance(value, int | float | str | None) or (isinstance(value, Tensor) and value.numel() == 1)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value
