"""The folder that `toolkit push` uploads: weights of a finished run, its model card, pictures and numbers."""

from __future__ import annotations

import shutil
from pathlib import Path

from toolkit.checkpoint import without_model
from toolkit.checkpoint.retention import best_or_newest
from toolkit.commands.report.model_card import model_card, without_paths
from toolkit.commands.report.records import RunRecord
from toolkit.dynamic.records import LIFECYCLE_FILE
from toolkit.errors import UserError, one_line
from toolkit.experts.state import manifest
from toolkit.run.folder import changed_files, results_of
from toolkit.run.pictures.plots import draw_loss, points_of, save_figure
from toolkit.run.runs_table import is_number

FOLDER = "push"
"""Of the run's folder."""
SAVED = {"model": "config.json", "merged": "config.json", "adapter": "adapter_config.json"}
"""Folders of a run with weights that transformers or PEFT read, and what they must hold; the first that is there."""
OF_THE_RUN = ("config.json", "results.json", "metrics.jsonl", LIFECYCLE_FILE)
"""Copied to run/. Not code.txt, which holds the changes to the working tree."""


def write_model_folder(run: RunRecord, name: str, license_id: str | None) -> Path:
    """Write `push/` in the folder of `run`, for the repository `name`; an earlier one is replaced.

    Raises UserError where the run is not finished, has no weights, a damaged file or a link among what is uploaded, or
    its folder cannot be written.
    """
    if results_of(run.folder) is None:
        raise UserError(f"{run.folder}: the run is not finished: type its command again to complete it.")
    if changed := changed_files(run.folder):
        raise UserError(f"{run.folder}: {', '.join(changed)} was changed after the run was finished: restore it.")
    parts = [run.folder / name for name in (*SAVED, *OF_THE_RUN)]
    taken = [*parts, *(path for part in parts for path in part.rglob("*")), *run.folder.glob("*.png")]
    if links := [path for path in taken if path.is_symlink()]:
        raise UserError(f"{links[0]}: is a link, and what it leads to would be uploaded: put the file itself there.")
    target = run.folder / FOLDER
    writing = run.folder / f".{FOLDER}.partial"
    try:
        shutil.rmtree(writing, ignore_errors=True)
        writing.mkdir()
        library, before = _copy_weights(run.folder, writing)
        pictures = _copy_pictures(run, writing)
        _copy_numbers(run.folder, writing)
        card = model_card(run, writing, name, library=library, pictures=pictures, license_id=license_id, before=before)
        (writing / "README.md").write_text(card, encoding="utf-8")
        shutil.rmtree(target, ignore_errors=True)
        writing.rename(target)
    except OSError as error:
        raise UserError(
            f"{target} cannot be written ({error.strerror}): make room, or copy the run elsewhere."
        ) from None
    finally:
        shutil.rmtree(writing, ignore_errors=True)
    return target


def _copy_weights(run: Path, target: Path) -> tuple[str, str | None]:
    """Copy or export the weights; returns the library that reads them, and the model card that was beside them."""
    for folder, needed in SAVED.items():
        if (run / folder / needed).exists():
            shutil.copytree(run / folder, target, dirs_exist_ok=True)
            _cut_paths(target / needed)
            card = target / "README.md"
            # That of an adapter is PEFT's template, with nothing filled in.
            before = card.read_text(encoding="utf-8") if card.exists() and folder == "model" else None
            return "peft" if folder == "adapter" else "transformers", before
    found = best_or_newest(run / "checkpoints")
    if found is None:
        raise UserError(
            f"{run}: holds no weights, neither a model/ nor a checkpoint: train it again, or push another run."
        )
    if damage := manifest.find_damage(found):  # the card's figures are of these weights, not of older ones
        raise UserError(
            f"{run}: its checkpoint {found.name} is damaged ({damage}): restore it, train the run again, "
            "or push another."
        )
    without_model.export(found, target / "model.safetensors")
    return "toolkit", None


def _copy_pictures(run: RunRecord, target: Path) -> list[str]:
    """Copy the run's pictures; the curves come first, and are drawn where they are missing."""
    for picture in sorted(run.folder.glob("*.png")):
        shutil.copy2(picture, target)
    # A line of a damaged file may have anything in a number's place.
    lines = [{name: value for name, value in line.items() if is_number(value)} for line in run.lines]
    if not (target / "loss.png").exists() and any(points_of(lines, f"{group}/loss") for group in ("train", "eval")):
        save_figure(target / "loss.png", lambda figure: draw_loss(figure, lines))
    return sorted((path.name for path in target.glob("*.png")), key=lambda name: (name != "loss.png", name))


def _copy_numbers(run: Path, target: Path) -> None:
    (target / "run").mkdir()
    for name in OF_THE_RUN:
        if (run / name).exists():
            shutil.copy2(run / name, target / "run")
            _cut_paths(target / "run" / name)


def _cut_paths(path: Path) -> None:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        remedy = "put back the one that the run wrote, or push another run"
        raise UserError(f"{path.name} of the run is no text ({one_line(error)}): {remedy}.") from None
    path.write_text(without_paths(text), encoding="utf-8")
