"""The drawing of the nine hooks in `toolkit/train/callbacks/base.py` is what happens."""

import re
from typing import Any

import pytest

from tests.support.helpers import run_distributed
from tests.traps.toys import toy_data, toy_trainer
from toolkit.data.batches import EvalBatches
from toolkit.data.table import TensorTable
from toolkit.errors import UserError
from toolkit.train.callbacks import base
from toolkit.train.callbacks.base import HOOKS, Callback, check_callbacks
from toolkit.train.callbacks.checkpointing import Checkpointing
from toolkit.train.callbacks.early_stopping import EarlyStopping
from toolkit.train.callbacks.preemption import Preemption
from toolkit.train.callbacks.throughput import Throughput
from toolkit.train.trainer import Trainer

STOPPING = EarlyStopping(1, "eval/loss")


def hooks_in_the_drawing() -> list[str]:
    assert base.__doc__ is not None
    drawing = base.__doc__[base.__doc__.index("    fit:") : base.__doc__.index("Callbacks run in the order")]
    return re.findall(r"\bon_\w+", drawing)


def recorder(calls: list[str], name: str = "") -> Callback:
    """A callback that has all nine hooks and writes down each call."""

    def hook(hook_name: str) -> Any:
        return lambda *_: calls.append(name + hook_name)

    return type("Recorder", (Callback,), {h: hook(h) for h in HOOKS})()


class EvaluateAndSave(Callback):
    def on_step_end(self, trainer: Trainer) -> None:
        inputs, labels = toy_data(5)
        trainer.evaluate(EvalBatches(TensorTable(input=inputs, label=labels), batch_size=2))
        trainer.call_hooks("on_save", None)


class Fail(Callback):
    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.state.step == 2:
            raise RuntimeError("step two is unwell")


def two_steps() -> list[str]:
    calls: list[str] = []
    toy_trainer(max_steps=2, callbacks=[recorder(calls), EvaluateAndSave()]).fit()
    return calls


def two_steps_and_a_failure() -> list[str]:
    calls: list[str] = []
    with pytest.raises(RuntimeError, match="step two is unwell"):
        toy_trainer(max_steps=3, callbacks=[recorder(calls), Fail()]).fit()
    return calls


def two_recorders() -> list[str]:
    calls: list[str] = []
    toy_trainer(max_steps=1, callbacks=[recorder(calls, "first "), recorder(calls, "second ")]).fit()
    return calls


STEP = ["on_step_start", "on_before_forward", "on_before_optimizer_step", "on_step_end"]


def test_two_steps_call_the_hooks_as_drawn():
    (calls,) = run_distributed(two_steps, 1)
    step = [*STEP, "on_evaluate_end", "on_save"]
    assert calls == ["on_fit_start", *step, *step, "on_fit_end"]
    drawn = hooks_in_the_drawing()
    assert drawn == ["on_fit_start", *step, "on_fit_end", "on_exception"]
    assert set(drawn) == set(HOOKS)


def test_a_failure_calls_on_exception_in_place_of_on_fit_end():
    (calls,) = run_distributed(two_steps_and_a_failure, 1)
    assert calls == ["on_fit_start", *STEP, *STEP, "on_exception"]


def test_callbacks_run_in_the_order_of_the_list():
    (calls,) = run_distributed(two_recorders, 1)
    assert calls == [who + hook for hook in ("on_fit_start", *STEP, "on_fit_end") for who in ("first ", "second ")]


def test_every_hook_is_a_method_of_callback_with_a_docstring():
    methods = [name for name in vars(Callback) if name.startswith("on_")]
    assert sorted(methods) == sorted(HOOKS)
    assert all(getattr(Callback, name).__doc__ for name in HOOKS)


# --- the order of the list ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        ([Preemption(), Checkpointing()], "Checkpointing must come before Preemption"),
        (
            [STOPPING, Checkpointing()],
            "Checkpointing must come before EarlyStopping",
        ),
        ([Checkpointing(), Throughput()], "Throughput must come before Checkpointing"),
    ],
)
def test_a_wrong_order_is_refused_when_the_trainer_is_made(callbacks: list[Callback], message: str):
    with pytest.raises(ValueError, match=message):
        toy_trainer(max_steps=1, callbacks=callbacks)


def test_check_callbacks_misspelt_hook_raises_with_the_nearest_name():
    misspelt = type("Misspelt", (Callback,), {"on_steps_end": lambda self, trainer: None})  # noqa: ARG005
    with pytest.raises(UserError, match=r"Misspelt\.on_steps_end is not a hook .* Did you mean on_step_end\?"):
        check_callbacks([misspelt()])


def test_an_order_that_every_callback_declares_possible_is_accepted():
    check_callbacks([recorder([]), Throughput(), Checkpointing(), STOPPING])


# --- state in checkpoints -------------------------------------------------------------------------------------------


class Counter(Callback):
    """Counts steps, from `start`."""

    def __init__(self, start: int, state_key: str = ""):
        self.count, self.state_key = start, state_key

    def on_step_end(self, trainer: Trainer) -> None:  # noqa: ARG002
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def test_two_callbacks_of_one_class_with_one_key_are_refused():
    with pytest.raises(ValueError, match="would save their state as 'Counter' in checkpoints: give each a `state_key`"):
        check_callbacks([Counter(0), Counter(10)])
    check_callbacks([recorder([]), recorder([])])  # which have no state


def resumed_counts() -> list[int]:
    trainer = toy_trainer(max_steps=2, callbacks=[Counter(0, "first"), Counter(10, "second"), Counter(20)])
    trainer.fit()
    counters = [Counter(0, "first"), Counter(0, "second"), Counter(0)]
    toy_trainer(max_steps=2, callbacks=counters).load_state_dict(trainer.state_dict())
    return [counter.count for counter in counters]


def test_two_callbacks_of_one_class_resume_with_their_own_state():
    assert run_distributed(resumed_counts, 1) == [[2, 12, 22]]
