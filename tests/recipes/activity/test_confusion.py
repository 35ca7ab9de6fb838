"""Confusion matrices as plots and tables, and macro-F1 in the summary."""

import json

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from activity.confusion import draw_confusion, draw_last_confusion
from toolkit.run.summary import summarise
from toolkit.run.tracking.guard import expand
from toolkit.run.tracking.jsonl import last_tables

SHARES = [[0.5, 0.125, 0.0], [0.0, 0.375, 0.0], [0.0, 0.0, 0.0]]


def test_draw_confusion_shows_percent_of_row_and_examples():
    figure = Figure()
    draw_confusion(figure, SHARES, ["walk", "use_telephone", "never_seen"], 16)
    axes = figure.axes[0]
    cells = {text.get_position(): text.get_text() for text in axes.texts}
    assert cells == {(0, 0): "80", (1, 0): "20", (1, 1): "100"}
    rows, columns = (
        [label.get_text() for label in labels] for labels in (axes.get_yticklabels(), axes.get_xticklabels())
    )
    assert rows == ["walk  (10)", "use telephone  (6)", "never seen  (0)"]
    assert columns == ["walk", "use telephone", "never seen"]


def test_draw_last_confusion_draws_last_evaluation(tmp_path):
    tables = [[[0.5, 0.0], [0.5, 0.0]], [[0.5, 0], [0, 0.5]]]
    lines = [json.dumps({"step": step, "eval/confusion": table}) for step, table in enumerate(tables)]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, ""]))
    pictures = draw_last_confusion(tmp_path, {"classes": ["a", "b"], "test_examples": 4})
    assert list(pictures) == ["confusion"]
    with Image.open(pictures["confusion"]) as image:
        pixels = np.asarray(image.convert("RGB")).astype(int)
    blue = pixels[..., 2] - pixels[..., 0] > 60
    half = blue.shape[1] // 2
    assert blue[:, :half].sum() > 1000, "first diagonal cell"
    assert blue[:, half:].sum() > 1000, "second diagonal cell"


def test_trackers_get_confusion_as_table_of_last_evaluation():
    assert expand({"eval/confusion": SHARES, "eval/macro_f1": 0.5}) == {"eval/macro_f1": 0.5}
    lines = [{"step": 1, "eval/confusion": [[1.0]]}, {"step": 2, "eval/confusion": SHARES, "moe/placement/0": [[0]]}]
    assert last_tables(lines) == {"eval/confusion": SHARES}


def test_summary_shows_macro_f1(tmp_path):
    text = summarise({"recipe": "har", "test_accuracy": 0.7, "test_loss": 1.0, "test_macro_f1": 0.5123}, tmp_path)
    assert "70.00%, loss 1.0000, macro-F1 0.512" in text
