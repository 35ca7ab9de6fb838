"""Which checkpoint of a run is the newest that verifies."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.checkpoint.copies import find_with_copies
from toolkit.checkpoint.retention import newest_first, step_of
from toolkit.experts.state import manifest
from toolkit.experts.state.checkpoint_files import STATE, read

if TYPE_CHECKING:
    from toolkit.run.run import Run


def find_checkpoint(folder: Path, run: Run) -> Path | None:
    """The newest checkpoint under `folder`, or in the run's storage, that verifies, or None. A collective.

    Warns of those that do not.
    """
    if run.storage is not None:
        return find_with_copies(folder, run, _strangeness)

    def newest() -> Path | None:
        for path in newest_first(folder):
            if (damage := manifest.find_damage(path) or _strangeness(path)) is None:
                return path
            run.print(f"warning: checkpoint {path.name} is passed over: {damage}.")
        return None

    return run.on_main_and_share(newest)


def _strangeness(path: Path) -> str | None:
    """Why undamaged files in `path` are not those of its step, or None. Raises UserError for another format."""
    if STATE not in manifest.read_manifest(path)["files"]:
        return f"{STATE} is not in its manifest"
    about, saved = read(path)
    if about["step"] != step_of(path):
        return f"its files are those of step {about['step']}"
    try:
        is_state = saved["training"]["step"] == about["step"] and {"name", "scaler"} <= saved["optimizer"].keys()
    except (LookupError, TypeError, AttributeError):
        is_state = False
    return None if is_state and isinstance(saved["config"], dict) else f"{STATE} lacks what a checkpoint holds"
