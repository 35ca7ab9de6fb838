"""Log steps on the console, and the summary of a run."""

import pytest

from toolkit import progress_bar
from toolkit.run.console import metrics_line
from toolkit.run.summary import summarise
from toolkit.run.tracking.metric_names import is_share

LONG = {
    "train/epoch": 12.5,
    "train/loss": 12.09213,
    "train/accuracy": 1.0,
    "train/learning_rate": 1.8e-3,
    "perf/samples_per_second": 1_142_000.3,
}


def test_metrics_line_shows_progress_and_metrics():
    values = LONG | {"train/epoch": 1.279, "train/loss": 0.09213, "train/accuracy": 0.973}
    assert metrics_line(values | {"perf/samples_per_second": 14200.3}, 1200, 4690) == (
        "step 1,200/4,690  epoch  1.28  loss 0.0921  acc 97.30 %  lr 1.8e-03   14,200 samples/s"
    )
    evaluated = metrics_line(values | {"eval/loss": 0.1, "eval/accuracy": 0.5}, 50, 4690)
    assert evaluated.startswith("step    50/4,690")
    assert evaluated.endswith("test loss 0.1000  test acc 50.00 %")


@pytest.mark.parametrize(("step", "max_steps"), [(50, 4690), (1_234_567, 10_000_000)])
@pytest.mark.parametrize("seconds_left", [None, 42, 100 * 3600])
def test_metrics_line_with_evaluation_fits_and_keeps_test_metrics(step, max_steps, seconds_left):
    line = metrics_line(LONG | {"eval/loss": 10.1, "eval/accuracy": 0.5}, step, max_steps, seconds_left)
    assert len(line) <= 100
    assert line.startswith(f"step {step:>{len(f'{max_steps:,}')},}/{max_steps:,}")
    assert "loss 12.0921" in line
    assert "test loss 10.1000  test acc 50.00 %" in line


def test_narrow_metrics_line_keeps_step_and_time_left():
    assert metrics_line(LONG, 5, 10, 42, width=40) == "step  5/10  loss 12.0921  eta 0:42"


def test_summary_shows_moved_experts_and_rank_imbalance(tmp_path):
    steps = {"first_move_step": 18, "last_move_step": 27}
    results = {"recipe": "toy", "migrated_experts": 5, "imbalance_before_moves": 1.4, "imbalance_after_moves": 1.05}
    text = "moved experts  5 after step{}; busiest rank over the mean 1.40 before, 1.05 since\n"
    assert text.format("s 18 to 27") in summarise(results | steps, tmp_path)
    assert text.format(" 18") in summarise(results | steps | {"last_move_step": 18}, tmp_path)
    assert "moved experts" not in summarise({"recipe": "toy", "migrated_experts": 0}, tmp_path)


def test_summary_shows_load_per_expert(tmp_path):
    for shares, text in (([0.38, 0.12, 0.5], "50 38 12"), ([0.0, 0.4, *[0.03] * 20], "40 to 0")):
        assert f"load per expert  {text} % in moe\n" in summarise({"expert_load": {"moe": shares}}, tmp_path)


def test_summary_leaves_out_lines_and_parts_without_results(tmp_path):
    results = {"test_accuracy": 0.5, "test_macro_f1": 0.25, "test_loss": [0.1, 0.2], "steps": 3, "restarts": []}
    assert summarise(results, tmp_path).splitlines() == [
        "test accuracy  50.00%, macro-F1 0.250",
        f"files          {tmp_path}",
    ]


@pytest.mark.parametrize(
    ("environment", "terminal", "redraws"),
    [({}, True, True), ({}, False, False), ({"CI": "true"}, True, False), ({"TERM": "dumb"}, True, False)],
)
def test_progress_bar_needs_interactive_terminal(monkeypatch, environment, terminal, redraws):
    monkeypatch.setattr(progress_bar.os, "environ", environment)
    monkeypatch.setattr(progress_bar.sys.stderr, "isatty", lambda: terminal)
    assert progress_bar.bar_options()["disable"] is not redraws


def test_is_share_is_true_for_accuracies_and_f1_only():
    shares = "accuracy eval/accuracy test_logit_accuracy average_accuracy accuracy_top5 macro_f1 eval/f1"
    others = "loss test_loss word_error_rate perf/bf16_flops samples_per_second"
    assert [name for name in f"{shares} {others}".split() if is_share(name)] == shares.split()
