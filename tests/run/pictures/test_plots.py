"""Plots of a run."""

import json
from pathlib import Path
from unittest import mock

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from toolkit.run.pictures import plots
from toolkit.run.pictures.plots import Experts, _draw_loads, save_figure
from toolkit.train.pictures import draw_run


def write(folder, lines):
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def coloured_pixels(path):
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("RGB")).astype(int)
    return int((pixels.max(-1) - pixels.min(-1) > 60).sum())


def kept_figures(monkeypatch, *modules):
    """Return the figures by name that `modules` draw from now on instead of saving them."""
    figures = {}

    def keep(path, draw):
        draw(figures.setdefault(path.stem, Figure()))
        return path

    for module in modules:
        monkeypatch.setattr(module, "save_figure", keep)
    return figures


def figures_of(folder, monkeypatch, lines, results):
    """Return the figures of a run by name."""
    figures = kept_figures(monkeypatch, plots)
    draw_run(write(folder, lines), results)
    return figures


def moves_in(axes):
    """Return the positions of the lines that mark moved experts."""
    return [list(line.get_xdata()) for line in axes.get_lines() if line.get_label() == "experts moved"]


@pytest.mark.parametrize("experts", [4, 40])
def test_draw_run_with_moved_experts_draws_five_plots(tmp_path, experts):
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
    lines[1] |= {"eval/loss": 0.5, "eval/accuracy": 0.8}
    lines[1] |= {"moe/migrated_experts": 2, "moe/placement/block": after["block"]}
    moved = {"migrated_experts": 2, "first_move_step": 20, "last_move_step": 20}
    moved |= {"imbalance_before_moves": 1.2, "imbalance_after_moves": 1.1}
    results = {"expert_placement": after, "placement_before_moves": before, **moved}
    pictures = draw_run(write(tmp_path, lines), results)
    assert list(pictures) == ["loss", "expert_load", "rank_load", "expert_placement", "expert_moves"]
    for name, path in pictures.items():
        assert path == tmp_path / f"{name}.png"
        assert coloured_pixels(path) > 200 or (name == "expert_load" and experts > plots.MOST_LINES)


def test_replicated_expert_is_drawn_in_placements_and_moves(tmp_path, monkeypatch):
    lines = [{"step": step, "train/loss": 1.0, "moe/rank_imbalance": 1.5 - step / 100} for step in (10, 20, 30, 40)]
    lines[0] |= {"moe/placement/block": [[0, 1], [2]], "moe/load/block": [0.5, 0.5, 0.0]}
    lines[1] |= {"moe/placement/block": [[0, 1], [2, 0]], "moe/migrated_experts": 1}
    results = {"expert_placement": {"block": [[0, 1], [2, 0]]}, "placement_before_moves": {"block": [[0, 1], [2]]}}
    figures = figures_of(tmp_path, monkeypatch, lines, results)
    before, after = figures["expert_placement"].axes
    assert [text.get_text() for text in before.texts] == ["0", "1", "2"]
    assert [text.get_text() for text in after.texts] == ["0", "1", "2", "0"]
    assert [box.get_linewidth() == 2 for box in after.patches] == [False, False, False, True], "new on its rank"
    top, ranks = figures["expert_moves"].axes
    assert top.get_lines()[0].get_xydata().tolist() == [[10, 1.4], [20, 1.3], [30, 1.2], [40, 1.1]]
    assert moves_in(top) == moves_in(figures["loss"].axes[0]) == [[20, 20]]
    (mesh,) = ranks.collections
    # Two rows per expert, because expert 0 has two replicas at the end; columns begin at steps 0, 10 and 20.
    assert mesh.get_array().tolist() == [[0, 0, 0], [0, 0, 1], [0, 0, 0], [0, 0, 0], [1, 1, 1], [1, 1, 1]]
    assert mesh.get_coordinates()[0, :, 0].tolist() == [0, 10, 20, 40]


def test_expert_has_one_colour_in_all_plots(tmp_path, monkeypatch):
    loads = [{"step": step, "moe/load/block": [0.5, 0.3, 0.0, 0.2]} for step in (1, 2)]
    results = {"expert_placement": {"block": [[0], [1, 3]]}}  # expert 2 was removed
    figures = figures_of(tmp_path, monkeypatch, loads, results)
    lines = {line.get_label(): line.get_color() for line in figures["expert_load"].axes[0].get_lines()}
    (axes,) = figures["expert_placement"].axes
    assert [box.get_facecolor() for box in axes.patches] == [lines["0"], lines["1"], lines["3"]]


def draw_loads(points, placement):
    figure, experts = Figure(), Experts({"block": points}, {"block": placement})
    _draw_loads(figure, loads=experts.loads, placement=experts.placement)
    return figure.axes[0]


def test_inactive_experts_are_not_drawn_and_do_not_lower_fair_share():
    axes = draw_loads([(1, [0.5, 0.3, 0.2, 0.0, 0.0]), (2, [0.6, 0.4, 0.0, 0.0, 0.0])], [[0], [1, 3]])
    # Expert 2 was removed, 3 is active and without load, 4 was never active.
    assert [line.get_label() for line in axes.get_lines()] == ["0", "1", "2", "3", "fair: 33.3 %"]


def test_rows_of_heat_map_are_labelled_with_active_experts():
    active = [expert for expert in range(20) if expert != 1]
    axes = draw_loads([(1, [float(expert != 1) / 19 for expert in range(20)])], [active])
    ticks = zip(axes.get_yticks(), axes.get_yticklabels(), strict=True)
    named = {round(tick - 0.5): label.get_text() for tick, label in ticks}
    assert len(named) == plots.MOST_NAMED
    assert named == {row: str(active[row]) for row in named}


@pytest.mark.parametrize(
    ("lines", "results", "names"),
    [
        ([], {}, []),
        ([{"step": 1, "train/learning_rate": 0.1}], {}, []),
        (
            [{"step": 1, "train/loss": 0.1, "moe/load/block": [1.0], "moe/migrated_experts": 0}],
            {"expert_placement": {"block": [[0]]}, "migrated_experts": 0},
            ["loss"],
        ),
        (
            [{"step": 1, "train/loss": None}, {"step": 2, "train/loss": 0.0}, {"step": 3, "moe/load/b": [1.0, None]}],
            {},
            ["loss", "expert_load"],
        ),
    ],
    ids=["no metrics", "no loss", "one expert", "missing values"],
)
def test_draw_run_draws_only_plots_with_data(tmp_path, lines, results, names):
    before = dict(matplotlib.rcParams)
    assert list(draw_run(write(tmp_path, lines) if lines else tmp_path, results)) == names
    assert dict(matplotlib.rcParams) == before


def test_loads_of_deep_model_are_drawn_for_some_layers_in_order(tmp_path, monkeypatch):
    lines = [{"step": step, **{f"moe/load/block{i}": [0.5, 0.5] for i in range(40)}} for step in (1, 2)]
    (figure,) = figures_of(tmp_path, monkeypatch, lines, {}).values()
    assert [axes.get_title()[17:] for axes in figure.axes] == [f"block{i}" for i in plots.spread(range(40), 8)]
    assert figure.get_size_inches()[1] < 16


def test_save_figure_on_full_disk_keeps_old_plot(tmp_path, monkeypatch):
    path = save_figure(tmp_path / "x.png", lambda figure: figure.subplots().plot([1, 2]))
    before = path.read_bytes()
    monkeypatch.setattr(Path, "replace", mock.Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        save_figure(path, lambda figure: figure.subplots().plot([2, 1]))
    assert path.read_bytes() == before
