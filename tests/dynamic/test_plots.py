"""Figures and summary of dynamic experts."""

import numpy as np
from matplotlib.figure import Figure

from tests.dynamic.eventful import write_lifecycle
from tests.run.pictures.test_plots import coloured_pixels, kept_figures
from toolkit.dynamic import plots
from toolkit.dynamic.knowledge_graph_plot import EDGES, draw_knowledge_graph
from toolkit.dynamic.performance import performance_summary
from toolkit.dynamic.plots import draw_dynamic_run
from toolkit.dynamic.records import read_lifecycle
from toolkit.run.pictures import plots as run_plots
from toolkit.run.pictures.plots import colour_of, spread

FIGURES = ["training_metrics", "expert_activations", "expert_device_distribution"]
GRAPH = "knowledge_graph_epoch_004"


def draw(folder, ranks=1, **results):
    """Write a run with the events of `eventful` and draw it."""
    write_lifecycle(folder, ranks=ranks)
    (folder / "summary.txt").write_text("")
    return draw_dynamic_run(folder, results)


def test_draw_dynamic_run_writes_all_figures(tmp_path):
    paths = draw(tmp_path, ranks=2)
    assert list(paths) == [*FIGURES, GRAPH]
    for name, path in paths.items():
        assert path == tmp_path / f"{name}.png"
        assert coloured_pixels(path) > 2000, name


def test_draw_dynamic_run_numbers_experts_by_uid(tmp_path, monkeypatch):
    figures = kept_figures(monkeypatch, run_plots, plots)
    draw(tmp_path, ranks=2, placement_before_moves={"moe": [[0, 1], [2, 3]]}, first_move_step=400)
    axes = figures["expert_activations"].axes[0]
    lines = {line.get_label(): np.asarray(line.get_xydata()) for line in axes.get_lines()}
    steps = {label: points[np.isfinite(points[:, 1]), 0].tolist() for label, points in lines.items()}
    assert list(steps) == ["0", "1", "2", "3", "4", "5", "6", "fair: 20 %"]
    assert steps["3"] == list(range(20, 240, 20)), "merged after step 230"
    assert steps["6"] == [400], "reuses the logical id of 3 from step 390 on"
    moved = figures["expert_moves"].axes[1]
    assert [label.get_text() for label in moved.get_yticklabels()] == ["0", "1", "2", "6"]
    columns = figures["expert_device_distribution"].axes
    new = [[box.get_linewidth() == 2 for box in axes.patches] for axes in columns]
    assert new == [[False] * 4, [False] * 3 + [True] * 2, [False] * 3 + [True, False]]
    axes = columns[-1]
    assert [text.get_text() for text in axes.texts] == ["0", "1", "2", "6", "4"]
    colours = {line.get_label(): line.get_color() for line in figures["expert_activations"].axes[0].get_lines()}
    assert [box.get_facecolor() for box in axes.patches] == [colours[text.get_text()] for text in axes.texts]


def test_knowledge_graph_has_experts_and_relations_over_steps(tmp_path):
    write_lifecycle(tmp_path)
    epochs, figure = read_lifecycle(tmp_path), Figure()
    draw_knowledge_graph(figure, epochs, ["moe"])
    (axes,) = figure.axes  # 4 was split from 1, and 6 from 4
    assert [label.get_text() for label in axes.get_yticklabels()] == [f"expert {uid}" for uid in (0, 1, 4, 6, 2, 3, 5)]
    spans = [tuple(part[:, 0]) for lines in axes.collections for part in lines.get_segments()]
    assert spans == [(0, 400), (0, 400), (120, 400), (390, 400), (0, 400), (0, 230), (150, 310)]
    dots = [line.get_xydata()[0].tolist() for line in axes.get_lines() if line.get_marker() == "o"]
    assert {line.get_color() for line in axes.get_lines() if line.get_marker() == "o"} == {*map(colour_of, range(7))}
    steps = [epoch.step for epoch in epochs for _ in epoch.layers["moe"].active]
    assert sorted(x for x, _ in dots) == steps
    arrows = [(edge.xyann, edge.xy) for edge in axes.texts if edge.arrowprops["arrowstyle"] == "-|>"]
    assert sorted(arrows) == [((120, 1), (120, 2)), ((230, 5), (230, 4)), ((390, 2), (390, 3))]
    assert {edge.xy[0] for edge in axes.texts if edge.arrowprops["color"] == EDGES["similarity"][1]} == {*steps}


def test_performance_summary_lists_events_and_ranks(tmp_path):
    write_lifecycle(tmp_path, ranks=2)
    (tmp_path / "summary.txt").write_text("test accuracy  97.00%\n")
    text = performance_summary(tmp_path)
    assert "4 at first, 3 added, 1 merged, 1 pruned; 5 of 8 logical experts active; 1 sleeps, 1 changes undone" in text
    assert "97.00%" in text
    assert "390  6 split from 4" in text
    assert not any(line != line.rstrip() for line in text.splitlines())


def test_spread_keeps_first_and_last():
    assert spread(list(range(100)), 5) == [0, 25, 50, 74, 99]
    assert spread([1, 2], 5) == [1, 2]
