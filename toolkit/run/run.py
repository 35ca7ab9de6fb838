"""A run: the Accelerator, the seed, the folder, metrics and trackers.

with start_run("mnist_moe", config) as run:
    ...
    run.describe(dataset=data.name)             facts for results.json, the summary and the trackers
    results = trainer.fit()                     calls run.log
    return run.finish(results)                  results.json, summary.txt, pictures (`toolkit.train.pictures`)
"""

from __future__ import annotations

import errno
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from filelock import FileLock

from toolkit.errors import Preempted, UserError, require, require_type, system_error
from toolkit.experts.parallel.collectives import on_main
from toolkit.experts.parallel.groups import ExpertGroups, make_expert_groups
from toolkit.experts.parallel.nodes import launched_world
from toolkit.experts.parallel.seeding import derive_seed
from toolkit.integrations.accelerate.compat import reset_accelerator_state
from toolkit.run.accelerator import build_accelerator
from toolkit.run.config.experts import ExpertRunConfig
from toolkit.run.config.run import RunConfig, require_divisible
from toolkit.run.console import print_nowhere
from toolkit.run.folder import (
    DATA,
    FINISHING,
    is_finished,
    open_folder,
    recorded_config,
    remove_unused,
    write_json,
    write_text,
)
from toolkit.run.hardware import gpu_names, hardware
from toolkit.run.launch.restarts import command_to_continue, past_restarts, tell_folder
from toolkit.run.launch.world import is_set
from toolkit.run.machines import folder_of_machine
from toolkit.run.micro_batches import MicroBatches
from toolkit.run.pictures.plots import save_expert_figures
from toolkit.run.process_settings import process_settings
from toolkit.run.provenance import check_same_start, git_revision, versions
from toolkit.run.storage import Storage
from toolkit.run.summary import RESTART_REASON, summarise
from toolkit.run.tracking.guard import GuardedTracker
from toolkit.run.tracking.jsonl import MetricsFile, last_tables, read_metrics
from toolkit.run.tracking.metric_names import picture_name
from toolkit.run.tracking.trackers import check_installed, start_trackers

PICTURES_S, PICTURES_SHARE = 60.0, 0.05
"""Minimum seconds between plots of experts for trackers during training, also as a share of the time so far."""
T = TypeVar("T")
Draw = Callable[[Path, Mapping[str, Any]], Mapping[str, Path]]
"""`draw(folder, results)`: writes plots of a run to its folder, returns the plots for trackers by name."""


class Sink(Protocol):
    """A receiver of each log step, such as a progress bar or a tracker."""

    def log(self, values: Mapping[str, Any], step: int) -> None: ...


class Run:
    """The Accelerator, the folder and the metrics of one training run, from `start_run`."""

    def __init__(self, name: str, config: RunConfig, accelerator: Accelerator, *, owns_process_group: bool):
        self.name, self.config, self.accelerator = name, config, accelerator
        # Plain attributes, because a closed run has no Accelerator state to ask.
        self.device, self.rank = accelerator.device, accelerator.process_index
        self.world_size, self.is_main = accelerator.num_processes, accelerator.is_main_process
        self.seed = config.seed
        self.started = time.monotonic()
        self._next_pictures = self.started + PICTURES_S
        self.folder = Path()
        """Absolute path; the same on all ranks, or with `storage` one per machine."""
        self.ranks_here = list(range(self.world_size))
        """The ranks that share the folder, in order."""
        self.storage = Storage(config.storage) if config.storage else None
        self.continues = False
        """Whether the folder already held this unfinished run."""
        self.data: dict[str, Any] = {}
        """Identities of the data by use: see `toolkit.run.data`."""
        self._facts: dict[str, Any] = {}
        self._draws: list[Draw] = []
        self._owns_process_group = owns_process_group
        self._lock: FileLock | None = None
        self._metrics: MetricsFile | None = None
        self._sinks: list[Sink] = []
        self._trackers: list[GuardedTracker] = []
        self._has_begun = False
        self._settings = ExitStack()
        self._closed = False
        self._enter: Callable[[str], None] = lambda phase: None  # noqa: ARG005
        self._unwatch: Callable[[], None] = lambda: None

    @property
    def owns_folder(self) -> bool:
        """Whether this rank writes and deletes files in the folder: the first rank that shares it."""
        return self.rank == self.ranks_here[0]

    @cached_property
    def expert_groups(self) -> ExpertGroups:
        """Expert-parallel groups from the config. Without an expert config, every rank has all experts.

        The first access is a collective: make it on every rank.
        """
        config = self.config
        if not isinstance(config, ExpertRunConfig):
            return ExpertGroups()
        return make_expert_groups(
            config.ep_size_in(self.world_size),
            ep_stride=config.ep_stride,
            exchange=config.exchange,
        )

    @property
    def accumulation(self) -> int:
        """Gradient accumulation steps: the config's value, or more after a step ran out of memory."""
        return self.accelerator.gradient_accumulation_steps

    @property
    def checkpoints(self) -> Path:
        """Checkpoint folder."""
        return self.folder / "checkpoints"

    @property
    def resume(self) -> str:
        """The config's `resume` (auto, yes or no); auto after an automatic restart."""
        return "auto" if past_restarts() else self.config.resume

    @property
    def how_to_continue(self) -> str:
        """Command that continues training: the same command, with `run_dir` added if it was not given."""
        return command_to_continue(self.config.run_dir, self.folder)

    # --- deciding together ------------------------------------------------------------------------------------

    def on_main_and_share(self, decide: Callable[[], T]) -> T:
        """Run `decide` on the main process and broadcast the result. A collective.

        A UserError or a file system error in `decide` raises UserError on every rank.
        """

        def work() -> T:
            try:
                return decide()
            except OSError as error:
                if (said := system_error(error)) is None:
                    raise
                raise UserError(said) from error

        try:
            return on_main(work)
        except RuntimeError as error:
            raise error.__cause__ or error from None  # the main process raises its own error

    # --- facts, console and metrics ---------------------------------------------------------------------------

    def record_data(self, data: dict[str, Any]) -> None:
        """Record the identities of `data` by use. They are in config.json once training begins."""
        is_new, self.data = data != self.data, data
        if is_new and self._has_begun and self.is_main:
            _write_config(self, self.folder)

    @property
    def facts(self) -> dict[str, Any]:
        """Facts given to `describe`; facts that are functions are evaluated on access."""
        return {name: fact() if callable(fact) else fact for name, fact in self._facts.items()}

    def describe(self, **facts: Any) -> None:
        """Add plain facts about the run to results.json, the summary and the trackers' config.

        A fact that can change during training, such as the expert placement, is a function without arguments:
        results.json gets its final value. A `dataset_notice` is printed immediately and only once, so that users notice
        which data they train on.
        """
        notice = facts.get("dataset_notice")
        if notice and notice != self._facts.get("dataset_notice"):
            self.print(notice)
        self._facts |= facts

    def print(self, text: str) -> None:
        """Print `text` on the main process and flush. A full disk, a closed terminal or a closed pipe, as with `head`,
        does not end the run."""
        if not self.is_main:
            return
        try:
            sys.stdout.write(f"{text}\n")
            sys.stdout.flush()
        except BrokenPipeError:
            print_nowhere()
            with suppress(OSError):  # stderr may be the same pipe
                sys.stderr.write("notice: the reader of the output is gone: the run goes on.\n")
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
                raise

    def add_sink(self, sink: Sink) -> None:
        """Call `sink.log` at every log step on the main process."""
        self._sinks.append(sink)

    def begin(self, step: int = 0) -> None:
        """Write config.json, log a restart if there was one, and start the trackers. Training begins at `step`.

        Before this call, files of a continued run are not modified, so errors leave the run intact. A second call does
        nothing.
        """
        if self._has_begun:
            return
        self._has_begun = True
        if not self.is_main:
            return
        if self.continues and is_finished(self.folder):
            (self.folder / FINISHING).touch()
        if self.continues or (self.data and self._metrics is not None):  # without metrics, the run has no folder
            _write_config(self, self.folder)
        recorded = {
            **recorded_config(self.name, self.config),
            "world_size": self.world_size,
            **versions(),
            **self.facts,
        }
        self._trackers = start_trackers(self.config, self.name, self.folder, recorded, self.print)
        restarts = past_restarts()
        if restarts and self._metrics is not None:
            self._metrics.append(step, {"run/restarts": len(restarts), RESTART_REASON: restarts[-1]})
            for tracker in self._trackers:
                tracker.log({"run/restarts": len(restarts)}, step)

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Log one step: numbers, or lists of numbers such as expert loads. Main process only."""
        self.begin(step)
        if self._metrics is None:
            return
        self._metrics.append(step, values)
        for sink in (*self._sinks, *self._trackers):
            sink.log(values, step)
        if self._trackers and time.monotonic() >= self._next_pictures:
            self._show_experts(step)

    def _show_experts(self, step: int) -> None:
        """Send plots of experts so far to the trackers. Without them the run goes on: the last ones are drawn at its
        end."""
        self._next_pictures = time.monotonic() + max(PICTURES_S, PICTURES_SHARE * (time.monotonic() - self.started))
        with suppress(Exception), TemporaryDirectory() as folder:
            self._send(save_expert_figures(folder, self.folder / "metrics.jsonl"), step)

    def _send(self, pictures: Mapping[str, Path], step: int) -> None:
        images = {picture_name(path): path.read_bytes() for path in pictures.values()} if self._trackers else {}
        for tracker in self._trackers:
            tracker.log_images(images, step)

    def draw_at_finish(self, draw: Draw, *, instead_of: Draw | None = None) -> None:
        """Make `finish` call `draw` on the main process once, and not `instead_of`."""
        self._draws = [*(other for other in self._draws if other not in (draw, instead_of)), draw]

    def draw(self, draw: Draw, results: Mapping[str, Any]) -> None:
        """Call `draw` now and log its plots to the trackers. Main process only.

        Raises UserError or OSError if the plots cannot be written; other errors are printed.
        """
        try:
            self._send(draw(self.folder, results), results.get("steps", 0))
        except (UserError, OSError):
            raise
        except Exception as error:  # a plot is not worth a failed run
            self.print(f"no plots ({type(error).__name__}: {error})")

    def metrics(self) -> Iterator[dict[str, Any]]:
        """Return the log steps so far, including those before a restart. Main process only."""
        return read_metrics(self.folder / "metrics.jsonl")

    def seal_of_metrics(self) -> dict[str, Any] | None:
        """Return size and digest of the metrics so far for `truncate_metrics`; None except on the main process."""
        return None if self._metrics is None else self._metrics.seal()

    def truncate_metrics(self, step: int, seal: Mapping[str, Any] | None = None) -> None:
        """Remove the log steps after `step`, and warn if the remaining ones do not match `seal`."""
        if self._metrics is not None:
            self._metrics.truncate(step, seal)

    # --- the end ----------------------------------------------------------------------------------------------

    def watch(self, enter: Callable[[str], None], end: Callable[[], None]) -> None:
        """Call `enter` at each phase of `finish`, and `end` when the run closes or `watch` is called again."""
        self._unwatch()
        self._enter, self._unwatch = enter, end

    def finish(self, results: Mapping[str, Any]) -> dict[str, Any]:
        """Write results.json, summary.txt and plots, and return the results. A collective. The run is then finished.

        If a run is killed before its plots are complete, the same command continues and completes it. Raises UserError
        if the results cannot be written, and on the main process if the plots cannot be written.
        """
        self._enter("finish")
        self.begin()
        numbers = self.on_main_and_share(lambda: self._write_results(results))
        if self.is_main:
            for tracker in self._trackers:
                tracker.log_results(numbers, last_tables(self.metrics()))
            for draw in self._draws:
                self._enter("finish")
                self.draw(draw, numbers)
            (self.folder / FINISHING).unlink(missing_ok=True)
            if self.storage is not None:
                self._enter("finish")
                self.storage.put_finished(self.folder, self.print)
            self.print("\n" + summarise(numbers | {"dataset_notice": None}, self.folder).rstrip())
        self._enter("end")
        return numbers

    def _restore_folder(self) -> None:
        """Restore config.json and metrics.jsonl if they were removed during the run."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if not (self.folder / "config.json").exists():
            self.print(f"warning: files of {self.folder} were removed while the run went on: they are written again.")
            _write_config(self, self.folder)
        if self._metrics is not None:
            self._metrics.restore()

    def _write_results(self, results: Mapping[str, Any]) -> dict[str, Any]:
        restarted = [line for line in self.metrics() if RESTART_REASON in line]
        numbers = {
            "recipe": self.name,
            **self.facts,
            **results,
            "seed": self.seed,
            "world_size": self.world_size,
            "wall_seconds": round(time.monotonic() - self.started, 3),
            "device": str(self.device.type),
            **{f"{package}_version": version for package, version in versions().items()},
            "git_revision": git_revision(),
            "hardware": "; ".join(filter(None, (hardware(), gpu_names()))),
            "restarts": [f"at step {line['step']}: {line[RESTART_REASON]}" for line in restarted],
            "finished_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
        self._restore_folder()
        (self.folder / FINISHING).touch()
        write_json(self.folder / "results.json", numbers)
        write_text(self.folder / "summary.txt", summarise(numbers, self.folder))
        return numbers

    def close(self, *, failed: bool = False, wait_for_ranks: bool = True) -> None:
        """Release the folder, the trackers and the process group. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._unwatch()
        for tracker in self._trackers:
            tracker.close(failed=failed)
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None
        if self._lock is not None:
            self._lock.release()
            if failed and not self._has_begun and not self.continues:
                remove_unused(self.folder)
        self._settings.close()
        if self._owns_process_group and wait_for_ranks and dist.is_initialized():
            dist.destroy_process_group()
            reset_accelerator_state()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # These two are raised on all ranks. After other errors a rank can be missing, and a collective would hang.
        reaches_all = error is None or isinstance(error, (UserError, Preempted))
        failed = error is not None and not isinstance(error, Preempted)
        self.close(failed=failed, wait_for_ranks=reaches_all)


def start_run(name: str, config: RunConfig) -> Run:
    """Set up Accelerate, the seed and the folder. A collective; raises the same UserError on all ranks.

    Args:
        name: Name of the recipe, for the folder and trackers.
        config: Flags of the run.

    Returns:
        The run, a context manager.

    Raises:
        UserError: A batch size that the processes do not divide, a tracker that is not installed, another config than
            that of the run in the folder, and processes that were started with other configs.

    Example:
        >>> import tempfile, toolkit as tk
        >>> with tk.start_run("digits", tk.RunConfig(run_dir=tempfile.mkdtemp(), cpu=True)) as run:
        ...     run.begin()
        ...     run.log({"train/loss": 2.3}, step=1)
    """
    require_type("name", name, str, "Pass the name of the run, then the config")
    require_type("config", config, RunConfig, "Pass tk.RunConfig() or a config of a class derived from it")
    had_process_group = dist.is_initialized()
    if is_set("ACCELERATE_USE_FSDP"):
        config = config.replace(dense_parallel="fsdp2")
    run = Run(name, config, build_accelerator(config), owns_process_group=not had_process_group)
    try:
        check_same_start(name, config)
        require(
            not config.auto_batch_size,
            "auto_batch_size",
            True,
            "only the command of a recipe, without a launcher, takes it",
        )
        require(
            (config.num_processes or 1) == 1 or launched_world() is not None,
            "num_processes",
            config.num_processes,
            "only the command of a recipe starts processes; use accelerate.notebook_launcher",
        )
        pieces = run.world_size * config.gradient_accumulation_steps
        require_divisible(config.batch_size, run.world_size, config.gradient_accumulation_steps, pieces)
        run.on_main_and_share(lambda: check_installed(config.tracker))
        run.folder, run.continues, micro_batches = run.on_main_and_share(lambda: _open(run))
        run.folder, run.ranks_here = folder_of_machine(run.folder, config, run.rank, run.world_size)
    except BaseException as error:
        run.close(wait_for_ranks=isinstance(error, UserError))
        raise
    _seed(config.seed)
    if run.device.type == "cpu":
        run._settings.enter_context(process_settings())
    if run.is_main:
        tell_folder(run.folder)
    run.print(f"{'continuing' if run.continues else 'run folder'} {run.folder}")
    if micro_batches is not None:
        _take(run, micro_batches)
    return run


def _take(run: Run, micro_batches: MicroBatches) -> None:
    """Restore the micro-batch size that the run had reached before it was interrupted."""
    size, failed = micro_batches.micro_batch_size, micro_batches.out_of_memory_with
    run.accelerator.gradient_accumulation_steps = run.config.batch_size // run.world_size // size
    run.describe(micro_batch_size=size, out_of_memory_with=failed)
    run.print(f"micro-batches of {size} sample(s) on each process, because memory ran out with {failed}")


def _open(run: Run) -> tuple[Path, bool, MicroBatches | None]:
    """Choose and lock the folder, and write config.json into it. Called on the main process.

    Returns:
        The folder, whether it holds this run, and the micro-batch size reached after a step ran out of memory.
    """
    folder, run._lock, before = open_folder(run.name, run.config, run.print, run.storage)
    run.data = (before or {}).get(DATA) or {}
    if before is None:
        _write_config(run, folder)
    run._metrics = MetricsFile(folder / "metrics.jsonl", run.print)
    if before is None:
        return folder, False, None
    return folder, True, MicroBatches.read(folder, run.config.batch_size // run.world_size, run.world_size)


def _write_config(run: Run, folder: Path) -> None:
    write_json(folder / "config.json", recorded_config(run.name, run.config) | ({DATA: run.data} if run.data else {}))


def _seed(seed: int) -> None:
    """Seed the global generators, for initial weights and draws without an address
    (`toolkit.experts.parallel.seeding`)."""
    value = derive_seed(seed, "start")
    random.seed(value)
    np.random.seed(value % 2**32)
    torch.manual_seed(value)
