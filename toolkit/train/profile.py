"""`--profile`: a trace of a few steps, where their time goes, and what would change it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as torch_profile

from toolkit.experts.parallel.collectives import together
from toolkit.experts.parallel.waits import Mark, Wait, mark, seconds_between, waits
from toolkit.experts.routing.load_meter import LoadMeter
from toolkit.run.config.experts import ExpertRunConfig
from toolkit.run.config.run import RunConfig
from toolkit.train.callbacks.base import Callback
from toolkit.train.callbacks.throughput import Throughput

if TYPE_CHECKING:
    from toolkit.data.table import Batch
    from toolkit.train.trainer import Trainer

WARMUP_STEPS, STEPS = 10, 5
FOLDER = "profile"
ASIDE = ("evaluation", "checkpoint")
"""Phases that are no part of a step."""
INPUT_SHARE, WAITING_SHARE, EXCHANGE_SHARE, IDLE_SHARE, SMALL_SHARE = 0.2, 0.1, 0.3, 0.3, 0.5
"""Shares of a step above which data, waiting, collectives, an idle GPU, and operations of less than `SMALL_US` are
named as a cause."""
SYNCS = ("cudaStreamSynchronize", "cudaDeviceSynchronize")
SMALL_US = 20.0
UNEVEN = 1.2
"""The busiest rank's rows over the mean, above which experts are the cause of waiting."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a rank measured of the profiled steps, in seconds."""

    total: float
    data: float
    optimizer: float
    callbacks: float
    collectives: Sequence[tuple[str, float]]
    """Kind and duration of each, in order."""
    small: float
    """The share of a CPU's time that operations of less than `SMALL_US` take."""
    idle: float
    """The share of the time that a GPU had nothing to do; 0 on a CPU."""
    syncs: int
    """How often the host waited for a GPU."""


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Of the time of a step, means over ranks; they add up to 1."""

    compute: float
    exchange: Mapping[str, float]
    """By kind of collective, without waiting."""
    waiting: float
    """For the slowest rank, in collectives."""
    optimizer: float
    data: float
    other: float
    """Callbacks, such as metrics."""


class Profile(Callback):
    """Profiles five steps after ten, once: a trace of each rank for Perfetto, and five lines of where the time goes.

    The result `profile` has the shares and the cause; on GPUs also `gpu_idle`, the share of the time in which they had
    nothing to do, and `host_waits_per_step`, both means over ranks. What is learned is the same as without it. The
    ranks' durations of a collective tell exchange from waiting: the rank that comes last does not wait. Of gradients
    that is what remains after a rank's own backward.
    """

    runs_after = (Throughput,)
    """Which measures how long gradients take, and begins a new window afterwards."""

    def __init__(self) -> None:
        self._first = self._last = 0
        self._profiler: torch_profile | None = None
        self._scope: record_function | None = None
        self._phases: list[tuple[str, Mark]] = []
        self._waits: list[Wait] = []
        self._waits_before = 0
        """Waits that were noted when an evaluation or a save began."""
        self._meter: LoadMeter | None = None

    def on_fit_start(self, trainer: Trainer) -> None:  # noqa: ARG002
        self._first = -1  # a checkpoint may be loaded after this

    def on_step_start(self, trainer: Trainer, micro_batches: list[Batch]) -> None:  # noqa: ARG002
        if self._first < 0:
            steps = min(STEPS, trainer.max_steps - trainer.state.step - 1)
            warmup = min(WARMUP_STEPS, trainer.max_steps - trainer.state.step - steps)
            self._first = trainer.state.step + warmup
            self._last = self._first + steps

    def on_before_optimizer_step(self, trainer: Trainer) -> None:
        if self._profiler is not None:
            self._enter("optimizer", trainer.run.device)

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.state.step == self._last and self._profiler is not None:
            self._end(trainer)
        elif trainer.state.step == self._first < self._last:
            self._begin(trainer)

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:  # noqa: ARG002
        self._stop()

    def _stop(self) -> None:
        waits.also = None
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None

    def on_fit_end(self, trainer: Trainer) -> None:
        self._stop()
        if "profile" not in trainer.results:
            trainer.run.print("--profile: the run has too few steps: it needs one to warm up, and another one.")

    def _begin(self, trainer: Trainer) -> None:
        device = trainer.run.device
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        self._meter = LoadMeter(trainer.raw_model)
        self._meter.begin(trainer.state.step)
        self._profiler = torch_profile(activities=activities)
        self._profiler.start()
        waits.also = self._waits
        enter = trainer.enter

        def noting(phase: str) -> None:
            enter(phase)
            self._enter(phase, device)

        trainer.enter = noting  # type: ignore[method-assign]
        self._enter("callbacks", device)

    def _enter(self, phase: str, device: torch.device) -> None:
        if self._scope is not None:
            self._scope.__exit__(None, None, None)
        self._scope = record_function(phase)
        self._scope.__enter__()
        was_aside = bool(self._phases) and self._phases[-1][0] in ASIDE
        is_aside = phase in ASIDE
        if is_aside and not was_aside:
            self._waits_before = len(self._waits)
        elif was_aside and not is_aside:
            del self._waits[self._waits_before :]
        self._phases.append((phase, mark(device)))

    def _end(self, trainer: Trainer) -> None:
        run = trainer.run
        assert self._profiler is not None
        assert self._meter is not None
        self._enter("end", run.device)
        del vars(trainer)["enter"]
        waits.also = None
        assert self._scope is not None
        self._scope.__exit__(None, None, None)
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        if run.device.type != "cpu":
            torch.accelerator.synchronize()
        everyone = together(lambda: self._measured(profiler, run.device))
        steps = self._last - self._first
        self._meter.fold()
        imbalance = self._meter.read(trainer.state.step)[1].get("moe/rank_imbalance", 1.0)
        groups = self._meter.stacks[0].groups.ep_groups if self._meter.stacks else ()
        shares, slowest = shares_of(everyone, groups)
        folder = run.folder / FOLDER
        together(lambda: _export(profiler, folder / f"trace-rank-{run.rank:05d}.json.gz"))
        cause, remedy = verdict(shares, everyone, run.config, slowest=slowest, imbalance=imbalance)
        facts: dict[str, Any] = {"rank_imbalance": imbalance, "cause": cause, "remedy": remedy}
        if run.device.type == "cuda":
            facts["gpu_idle"] = mean(measured.idle for measured in everyone)
            facts["host_waits_per_step"] = mean(measured.syncs for measured in everyone) / steps
        trainer.results["profile"] = asdict(shares) | facts
        milliseconds = 1e3 * max(measured.total for measured in everyone) / steps
        head = f"profile of steps {self._first + 1:,} to {self._last:,}, {milliseconds:.1f} ms each; traces for "
        run.print("\n".join([f"{head}https://ui.perfetto.dev in {folder}", *lines_of(shares, slowest, cause, remedy)]))
        self._meter = None
        for callback in trainer.callbacks:
            if isinstance(callback, Throughput):
                callback.on_save(trainer, folder)  # the time of this is no training

    def _measured(self, profiler: torch_profile, device: torch.device) -> Measured:
        spans: defaultdict[str, float] = defaultdict(float)
        for (phase, begin), (_, end) in pairwise(self._phases):
            spans[phase] += seconds_between(begin, end)
        total = sum(seconds for phase, seconds in spans.items() if phase not in ASIDE)
        averages = profiler.key_averages()
        kernels = [event for event in averages if event.device_type == DeviceType.CUDA and not event.is_user_annotation]
        busy = sum(event.self_device_time_total for event in kernels) / 1e6
        own = [(event.self_cpu_time_total, event.count) for event in averages]
        small = sum(time for time, count in own if time < SMALL_US * count)
        on_gpu = device.type == "cuda"
        return Measured(
            total=total,
            data=spans["data"],
            optimizer=spans["optimizer"],
            callbacks=spans["callbacks"],
            collectives=[(wait.kind, wait.seconds) for wait in self._waits],
            small=0.0 if on_gpu else small / max(1.0, sum(time for time, _ in own)),
            idle=max(0.0, 1 - busy / total) if on_gpu else 0.0,
            # One is the profiler's, which waits for the device when it stops.
            syncs=max(0, sum(event.count for event in averages if event.key in SYNCS) - 1),
        )


def shares_of(everyone: Sequence[Measured], ep_groups: Sequence[Sequence[int]] = ()) -> tuple[Shares, int]:
    """Shares of a step, and the rank that waits least, given what each rank measured. Experts travel between the ranks
    of each of `ep_groups`, everything else between all."""
    world = len(everyone)
    total = sum(measured.total for measured in everyone)
    exchange: defaultdict[str, float] = defaultdict(float)
    waiting = [0.0] * world
    alike = len({tuple(kind for kind, _ in measured.collectives) for measured in everyone}) == 1
    for rank, measured in enumerate(everyone):
        peers = [everyone[peer] for group in ep_groups if rank in group for peer in group] or [measured]
        for place, (kind, seconds) in enumerate(measured.collectives):
            group = peers if kind == "experts" else everyone
            least = min(peer.collectives[place][1] for peer in group) if alike else seconds
            exchange[kind] += least
            waiting[rank] += seconds - least
    parts = {name: sum(getattr(each, name) for each in everyone) / total for name in ("data", "optimizer", "callbacks")}
    by_kind = {kind: seconds / total for kind, seconds in exchange.items() if kind != "barrier"}
    away = sum(waiting) / total
    compute = 1 - sum(parts.values()) - sum(by_kind.values()) - away
    shares = Shares(
        compute=max(0.0, compute),
        exchange=by_kind,
        waiting=away,
        optimizer=parts["optimizer"],
        data=parts["data"],
        other=parts["callbacks"],
    )
    return shares, waiting.index(min(waiting))


def verdict(
    shares: Shares, everyone: Sequence[Measured], config: RunConfig, *, slowest: int, imbalance: float
) -> tuple[str, str]:
    """The likeliest cause of lost time, and what would change it. `imbalance`: rows of experts on the busiest rank over
    the mean."""
    idle, small = (sum(getattr(each, name) for each in everyone) / len(everyone) for name in ("idle", "small"))
    causes: dict[str, float] = {
        "input": shares.data / INPUT_SHARE,
        "waiting": shares.waiting / WAITING_SHARE,
        "exchange": sum(shares.exchange.values()) / EXCHANGE_SHARE,
        "idle": idle / IDLE_SHARE,
        "small": small / SMALL_SHARE,
    }
    cause = max(causes, key=lambda name: causes[name])
    if causes[cause] < 1:
        mixed = "--compile" if config.mixed_precision == "bf16" else "--mixed-precision bf16, where the device has it"
        return "compute, as it should be", mixed
    if cause == "input":
        return "input: the step waits for its data", f"--num-workers {max(4, 2 * config.num_workers)}"
    if cause == "waiting" and imbalance >= UNEVEN:
        planner = isinstance(config, ExpertRunConfig) and config.replan.planner is not None
        remedy = "a larger --balance-weight" if planner else "--replan.planner swap, or a larger --balance-weight"
        return f"expert imbalance: the busiest process has {imbalance:.2f} times the mean load", remedy
    if cause == "waiting":
        return f"a slow process: the others wait for rank {slowest}", "no flag: look at its machine and its data"
    if cause == "exchange":
        return "too many ranks for the batch", "a larger --batch-size, or fewer --num-processes"
    if cause == "idle" and any(each.syncs for each in everyone) and not config.compile:
        return f"host syncs and launches: the GPU is idle {idle:.0%} of the time", "--compile, or a larger --batch-size"
    pieces = config.gradient_accumulation_steps > 1
    remedy = "fewer --gradient-accumulation-steps" if pieces else "a larger --batch-size"
    return "small batch: operations are too short", remedy


def lines_of(shares: Shares, slowest: int, cause: str, remedy: str) -> list[str]:
    """Four lines: shares, exchange by collective, waiting, and the cause."""
    kinds = ", ".join(f"{kind} {share:.1%}" for kind, share in sorted(shares.exchange.items()))
    waits_for = f", mostly for rank {slowest}" if shares.waiting > 0 else ""
    return [
        f"  compute {shares.compute:.1%}, optimizer {shares.optimizer:.1%}, data {shares.data:.1%}, other "
        f"{shares.other:.1%}",
        f"  exchange {sum(shares.exchange.values()):.1%}" + (f": {kinds}" if kinds else ""),
        f"  waiting for the slowest rank {shares.waiting:.1%}{waits_for}",
        f"  likeliest cause: {cause}; try {remedy}",
    ]


def _export(profiler: torch_profile, path: Path) -> Any:
    path.parent.mkdir(exist_ok=True)
    profiler.export_chrome_trace(str(path))
