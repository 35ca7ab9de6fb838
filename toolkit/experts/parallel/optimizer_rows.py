"""Optimizers of owned parameters: the update of a row must depend only on that row, because each rank has other rows.

AdamW, Adagrad and SGD are element-wise. Adafactor, LAMB and Prodigy use statistics of a tensor or model, which would
cover only one rank's rows. There is no list of optimizer names: each optimizer is tried.
"""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
import weakref
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from toolkit.errors import UserError
from toolkit.experts.parallel.ownership import is_owned, ownership_of

ROWS, LARGEST, STEPS, LR, GROWTH = 5, 32, 3, 0.1, 100.0
"""Settings of a trial: rows of each owned parameter, maximum of its other dimensions, steps, learning rate, and growth
factor per step of the gradients of other experts. Optimizers with 8-bit states keep tensors below 4096 elements in 32
bits, so the stacked matrices of a trial are larger."""


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer inside `AcceleratedOptimizer`, or `optimizer` itself if it is not wrapped."""
    return getattr(optimizer, "optimizer", optimizer)


def check_optimizer(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise UserError if `optimizer` has a parameter outside `model`, lacks an expert or couples several experts."""
    refuse_foreign_parameters(model, optimizer)
    refuse_missing_experts(model, optimizer)
    refuse_coupled_rows(optimizer)


def refuse_coupled_rows(optimizer: Optimizer) -> None:
    """Raise UserError if updates of `optimizer` depend on rows of owned parameters that other ranks hold.

    A copy of the optimizer, with its settings, makes steps on small random tensors, twice: on two parameters of each
    kind in each group, because a trial of all takes seconds for a model of 48 layers. Between the two trials only
    the last row of owned parameters differs, so no other row may. If the trial fails, there is a warning. Weights,
    optimizer state and random state are unchanged.

    For any world size, also raises UserError if a state lacks a row for each parameter row: it could not be saved.
    """
    inner = unwrapped(optimizer)
    name = type(inner).__name__
    if all(ownership_of(p) is None for group in inner.param_groups for p in group["params"]):
        return
    parameters = _two_of_each_kind(inner)
    is_spread = any(is_owned(p) for p in parameters)
    try:
        (once, states), (again, _) = (_try(inner, parameters, others_differ=differ) for differ in (False, True))
    except Exception as error:  # of any optimizer, for any reason
        warnings.warn(
            f"optimizer {name} could not be tried on small tensors ({type(error).__name__}: {error}): with experts on "
            "several ranks, the update of an expert must not depend on other experts.",
            stacklevel=2,
        )
        return
    is_same = all(torch.isclose(a, b, rtol=0, atol=0, equal_nan=True).all() for a, b in zip(once, again, strict=True))
    if not is_same and is_spread:
        raise UserError(
            f"optimizer: {name} uses statistics of several experts, and each rank has other "
            "experts. Use an element-wise optimizer, such as AdamW, Adagrad or SGD."
        )
    require_rows_of_states(name, states)


def refuse_foreign_parameters(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise UserError for an optimizer that has a parameter outside `model`, whose state no checkpoint would hold."""
    known = set(model.parameters())
    for number, group in enumerate(unwrapped(optimizer).param_groups):
        for parameter in group["params"]:
            if parameter not in known:
                raise UserError(
                    f"optimizer: {type(unwrapped(optimizer)).__name__} has a parameter of shape "
                    f"{tuple(parameter.shape)} in group {number} that is not in the model, so checkpoints would "
                    "lack its state. Make it from model.parameters(), and give other parameters another optimizer."
                )


def has_stepped(optimizer: Optimizer) -> bool:
    """Whether there is more state than an optimizer can have when it is made: tensors of one number, as Adagrad's."""
    values = (value for state in unwrapped(optimizer).state.values() for value in state.values())
    return any(isinstance(v, Tensor) and bool((v != v.flatten()[:1]).any()) for v in values)


def refuse_missing_experts(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise UserError for an optimizer without all trainable experts of `model`."""
    held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter in model.named_parameters():
        if ownership_of(parameter) is not None and parameter.requires_grad and parameter not in held:
            raise UserError(f"optimizer: {name!r} of the experts is missing. Make it from model.parameters().")


def load_only_own_states(optimizer: Optimizer) -> list[RemovableHandle]:
    """Have `optimizer.load_state_dict` raise UserError for states of other rows of experts than this rank's.

    A checkpoint of `optimizer.state_dict()` has the states of the rank that wrote it, in the same shapes.

    Returns:
        The hooks.
    """

    def note_rows(_: Optimizer, state: dict[str, Any]) -> None:
        if (rows := _rows(optimizer)) is not None:
            state["experts"] = rows

    def compare(_: Optimizer, state: dict[str, Any]) -> None:
        if state["state"] and state.get("experts") != _rows(optimizer):
            raise UserError(
                "optimizer: this state is of other experts than this rank has. Use save and load of ExpertParallel or "
                "toolkit.experts instead of optimizer.state_dict()."
            )

    return [
        optimizer.register_state_dict_post_hook(note_rows),
        optimizer.register_load_state_dict_pre_hook(compare),
    ]


def _rows(optimizer: Optimizer) -> dict[str, Any] | None:
    """Return this rank and the ids of its rows by parameter, in plain values; None if it has all rows in order."""
    marks = [ownership_of(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    marked = [mark for mark in marks if mark is not None]
    if all(mark.groups.ep_size == 1 and mark.row_ids == tuple(range(len(mark.row_ids))) for mark in marked):
        return None
    return {"ep_rank": marked[0].groups.ep_rank, "rows": [list(mark.row_ids) for mark in marked]}


_STEPPED_BY = WeakTensorKeyDictionary()
"""Parameter -> reference to the only optimizer that can step it."""


def step_by_only(optimizer: Optimizer | None, parameters: Iterable[Tensor]) -> Callable[[], None]:
    """Have steps of any other optimizer with one of `parameters` raise UserError.

    Trainers make optimizers of their own. Their steps would not refresh replicas or rebalance, and would follow
    clipping by the norm of one rank's experts.

    Args:
        optimizer: None forbids steps of all optimizers with parameters that other ranks do not have.
        parameters: The experts' parameters.

    Returns:
        A function that ends it. Steps with expert-parallel parameters raise from then on: nothing averages gradients.
    """
    _watch_steps()
    listed = list(parameters)

    def end() -> None:
        for parameter in listed:
            if is_owned(parameter):
                _STEPPED_BY[parameter] = lambda: None
            else:
                _STEPPED_BY.pop(parameter, None)

    if optimizer is None:
        end()
    else:
        _STEPPED_BY.update(dict.fromkeys(listed, weakref.ref(optimizer)))
    return end


@functools.cache
def _watch_steps() -> None:
    register_optimizer_step_pre_hook(_refuse_another)


def _refuse_another(optimizer: Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if (prepared := _STEPPED_BY.get(parameter)) is not None and prepared() is not optimizer:
                raise UserError(
                    f"optimizer: {type(optimizer).__name__} has experts that were prepared with another optimizer, "
                    "with none, are copies, or are closed. Step the prepared optimizer, before close; for a Trainer, "
                    "which makes its own, call expert_trainer with a model that was not prepared."
                )


def require_rows(name: str, key: str, value: Tensor, parameter: Tensor) -> Tensor:
    """Return `value`, state `key` of `parameter`. Raises UserError with `name` unless it has one row per expert."""
    if value.shape[0] == parameter.shape[0]:
        return value
    raise UserError(
        f"optimizer: state {key!r} of {name!r} has shape {tuple(value.shape)}, and the experts have "
        f"{parameter.shape[0]} rows, so it cannot be saved or moved with them. Use an optimizer such as AdamW "
        "whose state has a row per expert."
    )


def require_rows_of_states(name: str, states: Iterable[tuple[Tensor, Mapping[str, Any]]]) -> None:
    """Call `require_rows` for the states of each parameter."""
    for parameter, state in states:
        for key, value in state.items():
            if isinstance(value, Tensor) and value.ndim:
                require_rows(name, key, value, parameter)


def _two_of_each_kind(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the first two parameters of each group with the same shape, precision, device and ownership."""
    numbers: Counter[Hashable] = Counter()
    found = []
    for index, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            kind = index, p.shape, p.dtype, p.device, p.requires_grad, ownership_of(p) is None, is_owned(p)
            numbers[kind] += 1
            if numbers[kind] <= 2:
                found.append(p)
    return found


def _try(
    optimizer: Optimizer, parameters: list[nn.Parameter], *, others_differ: bool
) -> tuple[list[Tensor], list[tuple[nn.Parameter, dict[str, Any]]]]:
    """Step a copy of `optimizer` on small parameters; return them, without the last row of owned parameters, and the
    owned parameters with their states.

    With `others_differ`, the last rows have different weights and gradients that grow from step to step, because an
    optimizer that normalizes gradients would not react to a constant factor.
    """
    draws, other_draws = torch.Generator().manual_seed(0), torch.Generator().manual_seed(1)
    growth = 1.0
    trials: list[nn.Parameter] = []
    replaced: dict[int, Any] = {}  # by `copy.deepcopy`, so that nothing in the copy is the optimizer's own

    def draw(like: Tensor) -> Tensor:
        sizes = [min(size, LARGEST) for size in like.shape]
        has_rows = ownership_of(like) is not None
        values = torch.randn([ROWS, *sizes[1:]] if has_rows else sizes, generator=draws)
        if has_rows and others_differ:
            values[-1] = growth * torch.randn(values.shape[1:], generator=other_draws)
        return values.to(like.device, torch.promote_types(like.dtype, torch.float32))

    for parameter in parameters:
        trial = nn.Parameter(draw(parameter))
        trials.append(trial)
        replaced[id(parameter)] = trial
        for value in optimizer.state.get(parameter, {}).values():
            if isinstance(value, Tensor) and value.ndim:
                filled = trial.new_zeros(trial.shape, dtype=torch.promote_types(value.dtype, torch.float32))
                replaced[id(value)] = filled + value.flatten()[0]
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            replaced.setdefault(id(parameter), nn.Parameter(torch.empty(0)))
    # Hooks are in ordered dicts; a scheduler puts its own `step` on the instance, and `ExpertSync` `train` and `eval`.
    attributes = {
        key: OrderedDict() if isinstance(value, OrderedDict) else value
        for key, value in vars(optimizer).items()
        if key not in ("step", "train", "eval")
    }
    tried = set(parameters)
    attributes["state"] = defaultdict(
        dict, {p: s for p, s in optimizer.state.items() if p in tried or not isinstance(p, Tensor)}
    )
    attributes["param_groups"] = [
        {**group, "params": [p for p in group["params"] if p in tried]} for group in optimizer.param_groups
    ]
    other = object.__new__(type(optimizer))
    other.__dict__ = copy.deepcopy(attributes, replaced)
    for group in other.param_groups:
        if isinstance(group.get("lr"), Tensor):
            group["lr"].fill_(LR)
        elif isinstance(group.get("lr"), float | int):
            group["lr"] = LR
    if callable(train := getattr(other, "train", None)):  # schedule-free optimizers step in training mode only
        train()
    step = type(optimizer).step
    closure = [lambda: torch.zeros(())] if len(inspect.signature(step).parameters) > 1 else []
    devices = {p.device.index for p in parameters if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=[index for index in devices if index is not None]):
        torch.manual_seed(0)
        for _ in range(STEPS):
            growth *= GROWTH
            for parameter, trial in zip(parameters, trials, strict=True):
                trial.grad = draw(parameter)
            step(other, *closure)  # type: ignore[arg-type]
    has_rows = [ownership_of(parameter) is not None for parameter in parameters]
    ends = [trial.detach()[:-1] if rows else trial.detach() for trial, rows in zip(trials, has_rows, strict=True)]
    return ends, [(t, other.state.get(t, {})) for t, rows in zip(trials, has_rows, strict=True) if rows]
