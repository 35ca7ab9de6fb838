"""W&B and TensorBoard trackers, through Accelerate's trackers."""

from __future__ import annotations

import importlib.util
import io
import os
import secrets
import shlex
import sys
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import psutil
from accelerate.tracking import TensorBoardTracker, WandBTracker

from toolkit.compat import is_wandb_service
from toolkit.errors import UserError, one_line
from toolkit.run.config.run import RunConfig
from toolkit.run.config.settings import leaves
from toolkit.run.folder import write_text
from toolkit.run.tracking.guard import Backend, GuardedTracker, Table

WANDB_START_S = WANDB_FINISH_S = 8.0
"""Seconds before W&B is turned off."""
LONGEST_TAG = 64
"""Maximum characters of a W&B tag."""
PROBE_S = 2.0
"""Timeout of the W&B server before the run stays offline, in seconds."""


def check_installed(tracker: str) -> None:
    """Raise UserError if TensorBoard is requested and not installed. W&B, the default, can be missing."""
    if tracker in ("tensorboard", "all") and importlib.util.find_spec("tensorboard") is None:
        raise UserError(f"tracker='{tracker}': TensorBoard is missing. Run pip install 'moe-toolkit[tensorboard]'.")


def start_trackers(
    config: RunConfig, recipe: str, folder: Path, recorded: Mapping[str, Any], say: Callable[[str], None]
) -> list[GuardedTracker]:
    """Start the trackers in `config.tracker`, each on its own thread, with `recorded` as their config."""
    backends: list[Backend] = []
    tracker, labels = config.tracker, labels_of(config, recipe, folder)
    if tracker in ("wandb", "all"):
        if importlib.util.find_spec("wandb") is None:
            say("W&B is not installed (pip install wandb); metrics.jsonl has every line.")
        elif os.environ.get("WANDB_MODE") != "disabled":
            backends.append(WandB(labels, folder, recorded, say))
    if tracker in ("tensorboard", "all"):
        backends.append(TensorBoard(folder, recorded))
    return [GuardedTracker(backend, say) for backend in backends]


class WandB(Backend):
    """W&B tracker: online with an API key and a reachable server, else offline. Never prompts."""

    name = "W&B"
    _tracker: WandBTracker
    """From `start` on."""

    def __init__(self, labels: Mapping[str, Any], folder: Path, config: Mapping[str, Any], say: Callable[[str], None]):
        self.labels, self.folder, self.config, self.say = labels, folder, config, say

    def start(self) -> str | None:
        os.environ.setdefault("WANDB_SILENT", "true")
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        reason = why_offline()
        if reason is None:
            project = "/".join(filter(None, (os.environ.get("WANDB_ENTITY"), self.labels["project"])))
            self.say(f"W&B: sending metrics to {project}. --tracker none turns it off.")
            try:
                return f"W&B: {self._init('online').url}"
            except Exception as error:
                reason = one_line(error)
                self._id_file.unlink()  # the W&B service does not start a second run with the same id
        folder = Path(self._init("offline").dir).parent
        if not folder.is_relative_to(self.folder):  # W&B falls back to another folder if it cannot write there
            return f"W&B is offline ({reason}), and {self.folder} takes no files of it; metrics.jsonl has every line."
        return f"W&B is offline ({reason}); wandb sync {shlex.quote(str(folder))} uploads the run."

    def _init(self, mode: str) -> Any:
        """Start a W&B run with the step as the axis of all metrics."""
        self._tracker = WandBTracker(
            self.labels["project"],
            dir=str(self.folder),
            **{label: self.labels[label] for label in ("name", "group", "tags")},
            id=self._id(),
            resume="allow" if mode == "online" else None,
            mode=mode,
            config=dict(self.config),
            settings={
                "console": "off",
                "silent": True,
                "disable_code": True,
                "init_timeout": WANDB_START_S,
                "finish_timeout": WANDB_FINISH_S,
            },
        )
        self._tracker.start()
        run = self._tracker.tracker
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        return run

    @property
    def _id_file(self) -> Path:
        return self.folder / "wandb" / "id"

    def _id(self) -> str:
        """Return the W&B id, stored in the run folder so that a continued run keeps its W&B run."""
        path = self._id_file
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            write_text(path, secrets.token_hex(4))
        return path.read_text().strip()

    def log(self, values: Mapping[str, float | list[float]], step: int) -> None:
        # Log the step as a value: W&B's own step cannot go back when a run is continued.
        plain = {name: _histogram(value) if isinstance(value, list) else value for name, value in values.items()}
        self._tracker.log({**plain, "step": step})

    def log_images(self, images: Mapping[str, bytes], step: int) -> None:
        self._tracker.log_images({name: [pixels(io.BytesIO(image))] for name, image in images.items()}, commit=False)
        self._tracker.log({"step": step})

    def log_results(self, results: Mapping[str, Any], tables: Mapping[str, Table]) -> None:
        """Log to the W&B summary, which compares runs, and as tables."""
        numbers = {name: value for name, value in results.items() if isinstance(value, (int, float))}
        self._tracker.tracker.summary.update(numbers)
        self._tracker.log_table("results", ["name", "value"], [[name, str(value)] for name, value in results.items()])
        classes = results.get("classes") or ()
        for name, rows in tables.items():
            names = [str(label) for label in (classes if len(classes) == len(rows) else range(len(rows)))]
            data = [[label, *row] for label, row in zip(names, rows, strict=True)]
            self._tracker.log_table(name, ["true class", *names], data)

    def finish(self, *, failed: bool) -> None:
        self._tracker.tracker.finish(exit_code=int(failed))

    def abandon(self) -> None:
        """Stop the W&B service now: in its atexit hook, a dead service prints a traceback and a stuck one blocks."""
        if (wandb := sys.modules.get("wandb")) is not None:
            wandb.teardown()

    def kill(self) -> None:
        for process in psutil.Process().children():
            if is_wandb_service(process.name()):
                process.kill()


class TensorBoard(Backend):
    """Event files in the run folder."""

    name = "TensorBoard"

    def __init__(self, folder: Path, config: Mapping[str, Any]):
        self.folder, self.config = folder, config
        self._tracker = TensorBoardTracker("tensorboard", logging_dir=str(folder))

    def start(self) -> str | None:
        self._tracker.start()
        self._tracker.store_init_configuration(_flat(self.config))
        return f"TensorBoard: tensorboard --logdir {shlex.quote(str(self.folder / 'tensorboard'))}"

    def log(self, values: Mapping[str, float | list[float]], step: int) -> None:
        self._tracker.log({name: value for name, value in values.items() if not isinstance(value, list)}, step=step)

    def log_images(self, images: Mapping[str, bytes], step: int) -> None:
        for name, image in images.items():
            self._tracker.log_images({name: pixels(io.BytesIO(image))[None]}, step=step, dataformats="NHWC")

    def finish(self, *, failed: bool) -> None:  # noqa: ARG002
        self._tracker.finish()


def labels_of(config: RunConfig, recipe: str, folder: Path) -> dict[str, Any]:
    """Return project, name, group and tags: flags, W&B's environment variables, else recipe, preset and folder."""
    words, named = [word for word in (recipe, config.preset) if word], config.names
    tags = [*words, *filter(None, os.environ.get("WANDB_TAGS", "").split(","))]
    return {
        "project": named["project"] or recipe,
        "name": named["run_name"] or " ".join([*words, folder.name]),
        "group": os.environ.get("WANDB_RUN_GROUP", " ".join(words)),
        "tags": [tag[:LONGEST_TAG] for tag in dict.fromkeys(tags)],
    }


def why_offline() -> str | None:
    """Return why W&B is offline; None with an API key and a reachable server. The key is not stored or printed."""
    import requests

    url = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    if (mode := os.environ.get("WANDB_MODE")) in ("offline", "dryrun"):
        return f"WANDB_MODE={mode}"
    server = urllib.parse.urlsplit(url).hostname or ""  # the address may hold a password
    if not (os.environ.get("WANDB_API_KEY") or requests.utils.get_netrc_auth(url)):
        return "no API key: wandb login"
    try:
        code = requests.get(url, timeout=PROBE_S, stream=True).status_code
    except (OSError, ValueError):
        return f"{server} does not answer"
    return None if code < 500 else f"{server} answers {code}"


def _histogram(values: Sequence[float]) -> Any:
    """Return W&B's histogram of a list: a bin per item, or for several of a very long list."""
    count, kind = len(values), sys.modules["wandb"].Histogram
    return kind(np_histogram=np.histogram(range(count), min(count, kind.MAX_LENGTH), (0, count), weights=values))


def pixels(file: Path | IO[bytes]) -> np.ndarray:
    """Read an image file as (height, width, 3) bytes."""
    from PIL import Image

    with Image.open(file) as image:
        return np.asarray(image.convert("RGB"))


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten nested values to dotted names and types that TensorBoard accepts."""
    return {name: value if isinstance(value, (bool, int, float, str)) else str(value) for name, value in leaves(values)}
