from __future__ import annotations

import json
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from toolkit.run.pictures import plots
from toolkit.run.pictures.plots import Experts, _draw_loads, draw_loss, save_figure
from toolkit.train.pictures import draw_run


def write(folder, lines):
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def colours(path):
    """How many pixels are neither white nor grey."""
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("RGB")).astype(int)
    return int((pixels.max(-1) - pixels.min(-1) > 60).sum())


def drawn(folder, monkeypatch, results):
    """The figures of a run in `folder` by name, and its lines of metrics."""
    figures = {}

    def keep(path, draw):
        draw(figures.setdefault(path.stem, Figure()))
        return path

    monkeypatch.setattr(plots, "save_figure", keep)
    draw_run(folder, results)
    return figures


@pytest.mark.parametrize("experts", [4, 40])
def test_draw_run_with_moved_experts_leaves_five_plots(tmp_path, experts):
    half = experts // 2
    before = {"block": [list(range(half)), list(range(half, experts))]}
    after = {"block": [[experts - 1, *range(1, half)], [0, *range(half, experts - 1)]]}
    lines = [
        {
            "step": step,
            "train/loss": 10.0 / step,
            "train/accuracy": 0.9,
            "moe/load/block": [1 / experts] * experts,
            "moe/rank_load/block": [0.4, 0.6],
            "moe/rank_imbalance": 1.2,
        }
        for step in (10, 20, 3000)
    ]
    lines[1] |= {
        "eval/loss": 0.5,
        "eval/accuracy": 0.8,
        "moe/migrated_experts": 2,
        "moe/placement/block": after["block"],
    }
    moved = {"migrated_experts": 2, "first_move_step": 20, "last_move_step": 20}
    moved |= {"imbalance_before_moves": 1.2, "imbalance_after_moves": 1.1}
    results = {"expert_placement": after, "placement_before_moves": before, **moved}
    pictures = draw_run(write(tmp_path, lines), results)
    assert list(pictures) == ["loss", "expert_load", "rank_load", "expert_placement", "expert_moves"]
    for name, path in pictures.items():
        assert path == tmp_path / f"{name}.png"
        assert colours(path) > 200 or (name == "expert_load" and experts > plots.MOST_LINES)


def test_plots_of_a_run_have_one_colour_for_one_expert(tmp_path, monkeypatch):
    loads = [{"step": step, "moe/load/block": [0.5, 0.3, 0.0, 0.2]} for step in (1, 2)]
    placement = {"block": [[0], [1, 3]]}  # 2 was removed
    figures = drawn(write(tmp_path, loads), monkeypatch, {"expert_placement": placement})
    lines = {line.get_label(): line.get_color() for line in figures["expert_load"].axes[0].get_lines()}
    (axes,) = figures["expert_placement"].axes
    boxes = [box.get_facecolor() for box in axes.patches]
    assert boxes == [lines["0"], lines["1"], lines["3"]]


def test_expert_moves_shows_the_rank_of_each_expert_from_each_move_on(tmp_path, monkeypatch):
    lines = [{"step": step, "moe/rank_imbalance": 1.5 - step / 100} for step in (10, 20, 30, 40)]
    lines[0]["moe/placement/block"] = [[0, 1], [2]]
    lines[1] |= {"moe/placement/block": [[0, 1], [2, 0]], "moe/migrated_experts": 1}
    results = {"expert_placement": {"block": [[0, 1], [2, 0]]}, "placement_before_moves": {"block": [[0, 1], [2]]}}
    figure = drawn(write(tmp_path, lines), monkeypatch, results)["expert_moves"]
    top, ranks = figure.axes
    assert top.get_lines()[0].get_xydata().tolist() == [[10, 1.4], [20, 1.3], [30, 1.2], [40, 1.1]]
    moves = [line for line in top.get_lines() if line.get_label() == "experts moved"]
    assert [list(line.get_xdata()) for line in moves] == [[20, 20]]
    (mesh,) = ranks.collections
    # Two rows per expert, for two replicas of expert 0 at the end; columns from steps 0, 10 and 20 on.
    assert mesh.get_array().tolist() == [[0, 0, 0], [0, 0, 1], [0, 0, 0], [0, 0, 0], [1, 1, 1], [1, 1, 1]]
    assert mesh.get_coordinates()[0, :, 0].tolist() == [0, 10, 20, 40]


def test_expert_placement_shows_before_and_after_moves(tmp_path, monkeypatch):
    lines = [{"step": 1, "moe/load/block": [0.5, 0.5, 0.0]}]
    results = {"expert_placement": {"block": [[0, 1], [2, 0]]}, "placement_before_moves": {"block": [[0, 1], [2]]}}
    before, after = drawn(write(tmp_path, lines), monkeypatch, results)["expert_placement"].axes
    assert [text.get_text() for text in before.texts] == ["0", "1", "2"]
    assert [text.get_text() for text in after.texts] == ["0", "1", "2", "0"]
    assert [box.get_linewidth() == 2 for box in after.patches] == [False, False, False, True], "new on its rank"


def test_draw_run_leaves_out_plots_without_content(tmp_path):
    lines = [{"step": 1, "train/loss": 0.1, "moe/load/block": [1.0], "moe/migrated_experts": 0}]
    results = {"expert_placement": {"block": [[0]]}, "migrated_experts": 0}
    assert list(draw_run(write(tmp_path, lines), results)) == ["loss"]


def draw_loads(figure, points, placement):
    experts = Experts({"block": points}, {"block": placement})
    _draw_loads(figure, loads=experts.loads, placement=experts.placement, colours=experts.colours)


def test_inactive_experts_are_no_lines_of_the_load_and_do_not_lower_the_fair_share():
    figure = Figure()
    draw_loads(figure, [(1, [0.5, 0.3, 0.2, 0.0, 0.0]), (2, [0.6, 0.4, 0.0, 0.0, 0.0])], [[0], [1, 3]])
    labels = [line.get_label() for line in figure.axes[0].get_lines()]
    assert labels == ["0", "1", "2", "3", "fair: 33.3 %"], "2 was removed, 3 is active and without load, 4 never was"


def test_rows_of_a_heat_map_have_the_numbers_of_their_experts():
    figure = Figure()
    active = [expert for expert in range(20) if expert != 1]
    draw_loads(figure, [(1, [float(e != 1) / 19 for e in range(20)])], [active])
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
    assert draw_run(tmp_path, {}) == {}
    assert draw_run(write(tmp_path, [{"step": 1, "train/learning_rate": 0.1}]), {}) == {}
    assert list(draw_run(write(tmp_path, [{"step": 1, "train/loss": 0.1}]), {})) == ["loss"]


def test_lines_without_numbers_do_not_stop_a_picture(tmp_path):
    lines = [{"step": 1, "train/loss": None}, {"step": 2, "train/loss": 0.0}, {"step": 3, "moe/load/b": [1.0, None]}]
    assert list(draw_run(write(tmp_path, lines), {})) == ["loss", "expert_load"]


def test_a_deep_model_shows_some_of_its_layers_first_and_last_among_them(tmp_path):
    lines = [{"step": s, **{f"moe/load/blocks.{i}": [0.5, 0.5] for i in range(40)}} for s in (1, 2)]
    (picture,) = draw_run(write(tmp_path, lines), {}).values()
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
    draw_run(write(tmp_path, [{"step": 1, "train/loss": 0.1}]), {})
    assert dict(matplotlib.rcParams) == before
