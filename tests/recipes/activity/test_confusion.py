from __future__ import annotations

import json

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from activity.confusion import draw_confusion, draw_last_confusion
from toolkit.run.summary import summarise
from toolkit.run.tracking.guard import expand
from toolkit.run.tracking.jsonl import last_tables

SHARES = [[0.5, 0.125, 0.0], [0.0, 0.375, 0.0], [0.0, 0.0, 0.0]]
CLASSES = ["walk", "use_telephone", "never_seen"]


def test_cells_are_percent_of_their_row_and_rows_say_how_many_examples_they_hold():
    figure = Figure()
    draw_confusion(figure, SHARES, CLASSES, 16)
    axes = figure.axes[0]
    assert [(text.get_position(), text.get_text()) for text in axes.texts] == [
        ((0, 0), "80"),
        ((1, 0), "20"),
        ((1, 1), "100"),
    ]
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "walk  (10)",
        "use telephone  (6)",
        "never seen  (0)",
    ]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["walk", "use telephone", "never seen"]


def test_a_run_that_evaluates_one_gets_the_picture_of_its_last(tmp_path):
    lines = [
        {"step": 1, "eval/confusion": [[0.5, 0.0], [0.5, 0.0]]},
        {"step": 2, "eval/confusion": [[0.5, 0], [0, 0.5]]},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    pictures = draw_last_confusion(tmp_path, {"classes": ["a", "b"], "test_examples": 4})
    assert list(pictures) == ["confusion"]
    with Image.open(pictures["confusion"]) as image:
        pixels = np.asarray(image.convert("RGB")).astype(int)
    dark = pixels[..., 2] - pixels[..., 0] > 60  # blue
    half = dark.shape[1] // 2
    assert dark[:, :half].sum() > 1000, "the diagonal's first cell"
    assert dark[:, half:].sum() > 1000, "and its second"


def test_a_table_is_no_curve_of_a_tracker():
    assert expand({"eval/confusion": SHARES, "eval/macro_f1": 0.5}) == {"eval/macro_f1": 0.5}
    lines = [{"step": 1, "eval/confusion": [[1.0]]}, {"step": 2, "eval/confusion": SHARES, "moe/placement/0": [[0]]}]
    assert last_tables(lines) == {"eval/confusion": SHARES}, "of the last evaluation, for when the run ends"


def test_the_summary_says_macro_f1_beside_the_accuracy(tmp_path):
    text = summarise({"recipe": "har", "test_accuracy": 0.7, "test_loss": 1.0, "test_macro_f1": 0.5123}, tmp_path)
    assert "70.00%, loss 1.0000, macro-F1 0.512" in text
