from __future__ import annotations

import json
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from toolkit.run.pictures import plots
from toolkit.run.pictures.plots import _draw_loads, draw_loss, draw_plots, save_figure


def write(folder, lines):
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def colours(path):
    """How many pixels are neither white nor grey."""
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("RGB")).astype(int)
    return int((pixels.max(-1) - pixels.min(-1) > 60).sum())


@pytest.mark.parametrize("experts", [4, 40])
def test_a_run_of_a_mixture_gets_three_pictures(tmp_path, experts):
    lines = [
        {"step": step, "train/loss": 10.0 / step, "train/accuracy": 0.9, "moe/load/block": [1 / experts] * experts}
        for step in (10, 20, 3000)
    ]
    lines[1] |= {"eval/loss": 0.5, "eval/accuracy": 0.8}
    half = experts // 2
    placement = {"block": [list(range(half)), list(range(half, experts))]}
    pictures = draw_plots(write(tmp_path, lines), placement)
    assert list(pictures) == ["loss", "expert_load", "expert_placement"]
    for name, path in pictures.items():
        assert path == tmp_path / f"{name}.png"
        assert colours(path) > 200 or (name == "expert_load" and experts > 16)


def test_inactive_experts_are_no_lines_of_the_load_and_do_not_lower_the_fair_share():
    figure = Figure()
    points = [(1, [0.5, 0.3, 0.2, 0.0, 0.0]), (2, [0.6, 0.4, 0.0, 0.0, 0.0])]
    _draw_loads(figure, {"block": points}, {"block": [[0], [1, 3]]})
    labels = [line.get_label() for line in figure.axes[0].get_lines()]
    assert labels == ["0", "1", "2", "3", "fair: 33.3 %"], "2 was removed, 3 is active and without load, 4 never was"


def test_rows_of_a_heat_map_have_the_numbers_of_their_experts():
    figure = Figure()
    active = [expert for expert in range(20) if expert != 1]
    _draw_loads(figure, {"block": [(1, [float(e != 1) / 19 for e in range(20)])]}, {"block": [active]})
    axes = figure.axes[0]
    ticks = zip(axes.get_yticks(), axes.get_yticklabels(), strict=True)
    named = {round(tick - 0.5): label.get_text() for tick, label in ticks}
    assert len(named) == plots.MOST_NAMED
    assert named == {row: str(active[row]) for row in named}


def test_the_loss_shows_when_experts_moved():
    figure = Figure()
    lines = [{"step": step, "train/loss": 1.0, "moe/migrated_experts": step == 2} for step in (1, 2, 3)]
    draw_loss(figure, lines)
    moves = [line for line in figure.axes[0].get_lines() if "moved" in line.get_label()]
    assert [(list(line.get_xdata()), line.get_label()) for line in moves] == [([2, 2], "experts moved")]


def test_only_what_there_is_data_for_is_drawn(tmp_path):
    assert draw_plots(tmp_path) == {}
    assert draw_plots(write(tmp_path, [{"step": 1, "train/learning_rate": 0.1}])) == {}
    assert list(draw_plots(write(tmp_path, [{"step": 1, "train/loss": 0.1}]))) == ["loss"]


def test_lines_without_numbers_do_not_stop_a_picture(tmp_path):
    lines = [{"step": 1, "train/loss": None}, {"step": 2, "train/loss": 0.0}, {"step": 3, "moe/load/b": [1.0, None]}]
    assert list(draw_plots(write(tmp_path, lines))) == ["loss", "expert_load"]


def test_a_deep_model_shows_some_of_its_layers_first_and_last_among_them(tmp_path):
    lines = [{"step": s, **{f"moe/load/blocks.{i}": [0.5, 0.5] for i in range(40)}} for s in (1, 2)]
    (picture,) = draw_plots(write(tmp_path, lines)).values()
    with Image.open(picture) as image:
        assert image.height < 2000


def test_a_disk_that_fills_up_leaves_the_picture_that_was_there(tmp_path, monkeypatch):
    path = save_figure(tmp_path / "x.png", lambda figure: figure.subplots().plot([1, 2]))
    before = path.read_bytes()

    def full(_, __):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space"):
        save_figure(path, lambda figure: figure.subplots().plot([2, 1]))
    assert path.read_bytes() == before


def test_drawing_leaves_the_callers_matplotlib_alone(tmp_path):
    before = dict(matplotlib.rcParams)
    draw_plots(write(tmp_path, [{"step": 1, "train/loss": 0.1}]))
    assert dict(matplotlib.rcParams) == before
