"""Properties of metrics, derived from their names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from toolkit.errors import UserError

Mode = Literal["min", "max"]
"""Whether the best value of a metric is the lowest or the highest."""
LOWER = r"loss|nats|bits|perplexity|cross_entropy|error|[wc]er|mse|mae"


def result_name(metric: str) -> str:
    """Return the name of an evaluation `metric` in results.json: `test_loss` for `eval/loss`, `validation_loss` for
    `validation/loss`."""
    name, _, key = metric.partition("/")
    return f"{'test' if name == 'eval' else name}_{key}"


def picture_name(path: Path) -> str:
    """Return the name of a plot in trackers, which is the same for all epochs."""
    return f"plots/{re.sub(r'_epoch_[0-9]+$', '', path.stem)}"


def is_share(metric: str) -> bool:
    """Return whether `metric` is an accuracy or F1, such as `eval/accuracy` or `test_macro_f1`: from 0 to 1, shown in
    percent."""
    return re.search(r"accuracy|f1(?![a-z0-9])", metric) is not None


def mode_by_name(metric: str) -> Mode | None:
    """Return the mode of accuracies, F1, losses and error rates; None for other metrics."""
    if is_share(metric):
        return "max"
    return "min" if re.search(rf"(?<![a-z])({LOWER})(?![a-z])", metric) else None


def require_mode(metric: str, mode: Mode | None) -> Mode:
    """Return `mode`, or `mode_by_name`. Raises UserError if there is neither."""
    known = mode or mode_by_name(metric)
    if known is None:
        remedy = "its name does not say whether higher is better. Set checkpoint.best_mode to max or min"
        raise UserError(field="best", value=metric, remedy=remedy)
    return known
