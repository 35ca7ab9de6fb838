"""A training function as the workers of Ray Train, as many as there is room for, started again when that changes."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.errors import EXIT_BUG, EXIT_DONE, EXIT_INTERRUPTED, UserError, is_out_of_memory
from toolkit.run.launch.restarts import ELASTIC, restarted

if TYPE_CHECKING:
    from ray.actor import ActorHandle

OUT_OF_MEMORY = "out of memory: use more --workers, or a smaller model."
SETTINGS = {
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # so that relative paths on the command line are those of this folder
    "RAY_USAGE_STATS_ENABLED": "0",
}


@dataclass(frozen=True, kw_only=True)
class RayJob:
    """How many workers there are, with what, and where Ray keeps its files."""

    workers: tuple[int, int]
    """Fewest and most; a world of fewer waits for machines."""
    cpu: bool = False
    """Train on CPUs even if the cluster has GPUs."""
    storage_path: str
    """A folder that all machines share, or a URI: Ray writes to `storage_path/name`."""
    name: str
    max_restarts: int
    """How often workers that failed are started again; growing does not count."""
    resize_every_s: float
    process_timeout: timedelta


@dataclass
class Journal:
    """What the driver, Ray's controller and the workers tell each other: an actor, which outlives the workers."""

    sizes: list[int] = field(default_factory=list)
    """The number of workers of each start."""
    reasons: list[str] = field(default_factory=list)
    cause: str = ""
    """Why the last workers ended, where they failed."""
    refusal: str = ""
    """Bad input, or too little memory: the workers are not started again."""

    def begin(self, size: int) -> tuple[list[str], str]:
        """Note that `size` workers start; returns why each start but the first was needed, and the refusal."""
        if self.sizes:
            cause = self.cause or "machines were added or taken away."
            self.reasons.append(f"{cause} {self.sizes[-1]} processes before, {size} from here on.")
        self.sizes.append(size)
        self.cause = ""
        return self.reasons, self.refusal

    def note(self, cause: str) -> None:
        self.cause = cause

    def refuse(self, message: str) -> None:
        self.refusal = message

    def ended(self) -> tuple[str, str]:
        """The refusal, and why the last workers failed."""
        return self.refusal, self.cause


def check_installed() -> None:
    """Raise UserError where Ray Train is missing."""
    os.environ.update({name: value for name, value in SETTINGS.items() if name not in os.environ})
    try:
        import ray.train.torch  # noqa: F401
    except ImportError:
        raise UserError("toolkit ray needs Ray Train, which is missing: pip install 'moe-toolkit[ray]'.") from None


Train = Callable[[Mapping[str, Any], bool, str], None]
"""Takes its arguments, whether to train on the CPU, and the name of the machine."""


def run_on_ray(train: Train, arguments: Mapping[str, Any], job: RayJob) -> int:
    """Have each worker of `job` call `train` with `arguments`, until all return; returns the exit code.

    Uses the cluster of RAY_ADDRESS, or one that runs on this machine; without any it starts one on this machine, for as
    many workers as are asked for. Raises UserError where a worker does.
    """
    check_installed()
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
    from ray.train.torch import TorchConfig, TorchTrainer
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    fewest, most = job.workers
    _connect(most)
    use_gpu = not job.cpu and bool(ray.cluster_resources().get("GPU"))
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    journal = ray.remote(num_cpus=0, scheduling_strategy=here)(Journal).remote()  # where it outlives other machines
    about = {"train": train, "arguments": arguments, "cpu": not use_gpu, "journal": journal, "folder": os.getcwd()}
    try:
        trainer = TorchTrainer(
            _work,
            train_loop_config=about,
            torch_config=TorchConfig(timeout_s=int(job.process_timeout.total_seconds())),
            scaling_config=ScalingConfig(
                num_workers=most if fewest == most else (fewest, most),
                use_gpu=use_gpu,
                elastic_resize_monitor_interval_s=job.resize_every_s,
            ),
            run_config=RunConfig(
                name=job.name,
                storage_path=job.storage_path,
                failure_config=FailureConfig(max_failures=job.max_restarts),
                callbacks=[_failure_notes(journal)],
            ),
        )
        trainer.fit()
        refusal, _ = ray.get(journal.ended.remote())
        if refusal:
            raise UserError(refusal)
    except TrainingFailedError:
        refusal, cause = ray.get(journal.ended.remote())
        if refusal:
            raise UserError(refusal) from None
        sys.stderr.write(f"error: {cause or 'the workers failed.'} (--max-restarts {job.max_restarts})\n")
        return EXIT_BUG
    except SystemExit:  # of Ray's handler of SIGINT, which has ended the workers
        sys.stderr.write("stopped by Ctrl-C.\n")
        return EXIT_INTERRUPTED
    finally:
        ray.shutdown()
    return EXIT_DONE


def _connect(most: int) -> None:
    """Connect to a cluster, or start one."""
    import ray

    settings: dict[str, Any] = {"runtime_env": {"worker_process_setup_hook": f"{__name__}.quieten"}}
    try:
        ray.init(address="auto", **settings)
    except ConnectionError:
        if "RAY_ADDRESS" in os.environ:
            raise
        ray.init(num_cpus=max(most, os.cpu_count() or 1), include_dashboard=False, **settings)


def quieten() -> None:
    """Keeps each process that Ray starts from warning every second that there is no dashboard."""
    logging.getLogger("ray.train.v2._internal.execution.controller.placement_group_cleaner").setLevel(logging.ERROR)


def _failure_notes(journal: ActorHandle) -> Any:
    """A callback of Ray's controller that tells `journal` why workers failed."""
    import ray
    from ray.train import UserCallback

    class FailureNotes(UserCallback):
        def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:  # noqa: ARG002
            ray.get(journal.note.remote(cause_of(worker_exceptions)))

    return FailureNotes()


def cause_of(failures: Mapping[int, Exception]) -> str:
    """In a sentence: a worker that is gone before one that raised, because the others of its world raise as well."""
    from ray.exceptions import RayActorError

    count = "" if len(failures) == 1 else f" (and {len(failures) - 1} more)"
    for rank, failure in sorted(failures.items()):
        if isinstance(failure, RayActorError):
            return f"rank {rank} was lost{count}."
    rank, failure = min(failures.items())
    lines = str(failure).strip().splitlines() or [type(failure).__name__]
    return f"rank {rank} failed{count}: {lines[-1].rstrip('.')}."


def _work(about: Mapping[str, Any]) -> None:
    """Train as one worker, in the thread in which Ray calls this."""
    import ray
    import torch.distributed as dist

    if Path(about["folder"]).is_dir():
        os.chdir(about["folder"])
    answer: list[Any] = [None]
    if dist.get_rank() == 0:
        answer[0] = ray.get(about["journal"].begin.remote(dist.get_world_size()))
    dist.broadcast_object_list(answer, src=0)
    reasons, refusal = answer[0]
    if refusal:
        return
    os.environ[ELASTIC] = "1"
    if reasons:
        os.environ.update(restarted(None, reasons))
    try:
        about["train"](about["arguments"], about["cpu"], ray.get_runtime_context().get_node_id()[:12])
    except UserError as error:  # alike on all ranks
        ray.get(about["journal"].refuse.remote(str(error)))
    except Exception as error:
        if is_out_of_memory(error):
            ray.get(about["journal"].refuse.remote(OUT_OF_MEMORY))
        raise
