"""The drawing of the eight hooks in `toolkit/callbacks/base.py` is what happens."""

import re
from typing import Any

import pytest

from tests.helpers import run_distributed
from tests.traps.toys import toy_data, toy_trainer
from toolkit.callbacks import base
from toolkit.callbacks.base import HOOKS, Callback
from toolkit.data.batches import EvalBatches
from toolkit.data.table import TensorTable
from toolkit.trainer import Trainer


def hooks_in_the_drawing() -> list[str]:
    assert base.__doc__ is not None
    drawing = base.__doc__[base.__doc__.index("    fit:") : base.__doc__.index("Callbacks run in the order")]
    return re.findall(r"\bon_\w+", drawing)


def recorder(calls: list[str], name: str = "") -> Callback:
    """A callback that has all eight hooks and writes down each call."""

    def hook(hook_name: str) -> Any:
        return lambda *_: calls.append(name + hook_name)

    return type("Recorder", (Callback,), {h: hook(h) for h in HOOKS})()


class EvaluateAndSave(Callback):
    def on_step_end(self, trainer: Trainer) -> None:
        inputs, labels = toy_data(5)
        trainer.evaluate(EvalBatches(TensorTable(input=inputs, label=labels), batch_size=2))
        trainer.hooks("on_save", None)


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


STEP = ["on_step_start", "on_before_optimizer_step", "on_step_end"]


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
