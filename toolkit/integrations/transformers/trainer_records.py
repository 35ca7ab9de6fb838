"""The `RouterMonitor` of transformers' Trainer: its values in logs, in a file, and as figures."""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.experts.router_monitor import RouterMonitor
from toolkit.integrations.transformers.compat import log_images
from toolkit.run.pictures.plots import save_expert_figures
from toolkit.run.tracking.jsonl import MetricsFile

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback


class RouterEvents:
    """The events in which a trainer's routers are read, recorded on rank 0, and drawn."""

    monitor: RouterMonitor

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self._file: MetricsFile | None = None
        self._draws = find_spec("matplotlib") is not None

    def watch(self, monitor: RouterMonitor) -> None:
        """Read `monitor` from now on."""
        self.monitor = monitor
        if self.trainer.is_world_process_zero():
            folder = Path(self.trainer.args.output_dir)
            folder.mkdir(parents=True, exist_ok=True)
            self._file = MetricsFile(folder / "metrics.jsonl", print)
            if not self._draws:
                warnings.warn("no plots of experts: install matplotlib.", stacklevel=2)
        if self.trainer.state.global_step == 0:
            self._record(monitor.metrics())

    def _record(self, values: dict[str, Any]) -> None:
        if self._file is not None:  # appending removes the lines of earlier training runs from this step on
            self._file.append(self.trainer.state.global_step, values)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:  # noqa: ARG002
        if "loss" in logs:
            values = self.monitor.metrics()
            self._record(values)
            logs |= {name: value for name, value in values.items() if not isinstance(value, list)}
            state.log_history[-1] |= logs

    def on_save(self, *_: Any, **__: Any) -> None:
        if self._file is not None and self._draws:
            figures = save_expert_figures(self._file.path.parent, self._file.path)
            for callback in self.trainer.callback_handler.callbacks:
                log_images(callback, figures, self.trainer.state.global_step)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        RouterEvents.on_save(self)  # without the checkpoint of a subclass
        self.monitor.close()
        del self.monitor  # which keeps the model in memory
        if self._file is not None:
            self._file.close()


def monitor_routers(trainer: Trainer) -> TrainerCallback:
    """Log the routers of a trainer's model, without expert parallelism: load, auxiliary loss, and trained experts.

    Each log step has the numbers of `RouterMonitor.metrics`, for whatever `report_to` names, and writes all values to
    `metrics.jsonl` in the output folder. Figures are written at each save and at the end, and sent to W&B and
    TensorBoard. Training does not change.

    Args:
        trainer: transformers' Trainer, or a trainer derived from it, such as SFTTrainer.

    Returns:
        The callback, whose `monitor` is the `RouterMonitor` while the trainer trains.

    Raises:
        UserError: When training begins, if the model has no experts.

    Example:
        >>> trainer = SFTTrainer(model, args=arguments, train_dataset=data, peft_config=adapters)
        >>> monitor_routers(trainer)
        >>> trainer.train()
    """
    from transformers import TrainerCallback

    class RouterCallback(RouterEvents, TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **of_trainer: Any) -> None:  # noqa: ARG002
            self.watch(RouterMonitor(of_trainer["model"]))

    callback = RouterCallback(trainer)
    # Before the callbacks of trackers, which then log its values.
    trainer.callback_handler.callbacks.insert(0, callback)
    return callback
