"""Properties of metrics, derived from their names."""

from __future__ import annotations

import re


def result_name(metric: str) -> str:
    """Return the name of an evaluation `metric` in results.json: `test_loss` for `eval/loss`, `validation_loss` for
    `validation/loss`."""
    name, _, key = metric.partition("/")
    return f"{'test' if name == 'eval' else name}_{key}"


def is_share(metric: str) -> bool:
    """Return whether `metric` is an accuracy or F1, such as `eval/accuracy` or `test_macro_f1`: from 0 to 1, higher is
    better, shown in percent. All other metrics are better when lower."""
    return re.search(r"accuracy|f1(?![a-z0-9])", metric) is not None
