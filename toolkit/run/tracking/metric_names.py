"""What the name of a metric tells about it."""

from __future__ import annotations

import re


def result_name(metric: str) -> str:
    """The name in results.json of a `metric` of an evaluation: `test_loss` for `eval/loss`, else `validation_loss` for
    `validation/loss`."""
    name, _, key = metric.partition("/")
    return f"{'test' if name == 'eval' else name}_{key}"


def is_share(metric: str) -> bool:
    """Whether `metric` is a share of what was right, such as `eval/accuracy` or `test_macro_f1`: from 0 to 1, higher is
    better, and read in percent. All other metrics are better when lower."""
    return re.search(r"accuracy|f1(?![a-z0-9])", metric) is not None
