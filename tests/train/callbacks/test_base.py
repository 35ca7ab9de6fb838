"""Hooks as drawn in `toolkit/train/callbacks/base.py`, the order of callbacks, and their state."""

import re
from typing import Any

import pytest

from tests.traps.toys import toy_data, toy_trainer
from toolkit.data.batches import EvalBatches
from toolkit.data.table import TensorTable
from toolkit.errors import UserError
from toolkit.train.callbacks import base
from toolkit.train.callbacks.base import HOOKS, Callback
from toolkit.train.callbacks.checkpointing import Checkpointing
from toolkit.train.callbacks.early_stopping import EarlyStopping
from toolkit.train.callbacks.preemption import Preemption
from toolkit.train.callbacks.throughput import Throughput

STEP = ["on_step_start", "on_before_forward", "on_before_optimizer_step", "on_step_end"]


def recorder(calls: list[str], name: str = "") -> Callback:
    """Return a callback that records the calls of all hooks."""

    def hook(hook_name: str) -> Any:
        return lambda *_: calls.append(name + hook_name)

    return type("Recorder", (Callback,), {h: hook(h) for h in HOOKS})()


class EvaluateAndSave(Callback):
    def on_step_end(self, trainer):
        inputs, labels = toy_data(5)
        trainer.evaluate(EvalBatches(TensorTable(input=inputs, label=labels), batch_size=2))
        trainer.call_hooks("on_save", None)


class Fail(Callback):
    def on_step_end(self, trainer):
        if trainer.state.step == 2:
            raise RuntimeError("step two failed")


def test_hooks_are_called_as_drawn_in_the_order_of_the_list():
    two_steps: list[str] = []
    toy_trainer(max_steps=2, callbacks=[recorder(two_steps), EvaluateAndSave()]).fit()
    failure: list[str] = []
    with pytest.raises(RuntimeError, match="step two failed"):
        toy_trainer(max_steps=3, callbacks=[recorder(failure), Fail()]).fit()
    both: list[str] = []
    toy_trainer(max_steps=1, callbacks=[recorder(both, "1 "), recorder(both, "2 ")]).fit()
    step = [*STEP, "on_evaluate_end", "on_save"]
    assert two_steps == ["on_init", "on_fit_start", *step, *step, "on_fit_end"]
    assert base.__doc__ is not None
    drawing = base.__doc__[base.__doc__.index("    Trainer(") : base.__doc__.index("Callbacks run in the order")]
    drawn = re.findall(r"\bon_\w+", drawing)
    assert drawn == ["on_init", "on_fit_start", *step, "on_fit_end", "on_exception"]
    assert set(drawn) == set(HOOKS) == {name for name in vars(Callback) if name.startswith("on_")}
    assert failure == ["on_init", "on_fit_start", *STEP, *STEP, "on_exception"]
    assert both == [who + hook for hook in ("on_init", "on_fit_start", *STEP, "on_fit_end") for who in ("1 ", "2 ")]


STOPPING = EarlyStopping(1, "eval/loss")


class Counter(Callback):
    """Counts steps, from `start`."""

    def __init__(self, start: int, state_key: str = ""):
        self.count, self.state_key = start, state_key

    def on_step_end(self, trainer):  # noqa: ARG002
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class Misspelt(Callback):
    def on_steps_end(self, trainer): ...


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        ([Preemption(), Checkpointing()], "Checkpointing must come before Preemption"),
        ([STOPPING, Checkpointing()], "Checkpointing must come before EarlyStopping"),
        ([Checkpointing(), Throughput()], "Throughput must come before Checkpointing"),
        ([Misspelt()], r"Misspelt\.on_steps_end is not a hook .* Did you mean on_step_end\?"),
        ([Counter(0), Counter(10)], "would save their state as 'Counter' in checkpoints: give each a `state_key`"),
    ],
)
def test_trainer_with_invalid_callbacks_raises(callbacks, message):
    with pytest.raises((ValueError, UserError), match=message):
        toy_trainer(max_steps=1, callbacks=callbacks)


def test_callbacks_of_one_class_resume_from_their_state_keys():
    trainer = toy_trainer(max_steps=2, callbacks=[Counter(0, "first"), Counter(10, "second"), Counter(20)])
    trainer.fit()
    counters = [Counter(0, "first"), Counter(0, "second"), Counter(0)]
    toy_trainer(max_steps=2, callbacks=counters).load_state_dict(trainer.state_dict())
    assert [counter.count for counter in counters] == [2, 12, 22]
