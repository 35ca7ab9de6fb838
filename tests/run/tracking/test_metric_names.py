"""Which metrics are shares."""

import pytest

from toolkit.run.tracking.metric_names import is_share


@pytest.mark.parametrize(
    "metric",
    ["accuracy", "eval/accuracy", "test_logit_accuracy", "average_accuracy", "accuracy_top5", "macro_f1", "eval/f1"],
)
def test_accuracies_and_f1_are_shares(metric: str):
    assert is_share(metric)


@pytest.mark.parametrize("metric", ["loss", "test_loss", "word_error_rate", "perf/bf16_flops", "samples_per_second"])
def test_other_metrics_are_none(metric: str):
    assert not is_share(metric)
