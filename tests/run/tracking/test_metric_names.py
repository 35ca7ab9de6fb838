"""Metrics that are shares, shown in percent."""

from toolkit.run.tracking.metric_names import is_share


def test_is_share_is_true_for_accuracies_and_f1_only():
    shares = "accuracy eval/accuracy test_logit_accuracy average_accuracy accuracy_top5 macro_f1 eval/f1"
    others = "loss test_loss word_error_rate perf/bf16_flops samples_per_second"
    assert [name for name in f"{shares} {others}".split() if is_share(name)] == shares.split()
