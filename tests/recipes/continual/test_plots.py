import numpy as np
from PIL import Image

from continual.plots import draw_accuracy_matrices, draw_average_accuracies

KEPT = [[0.9, 0.1, 0.1], [0.8, 0.9, 0.1], [0.8, 0.85, 0.9]]
LOST = [[0.9, 0.1, 0.1], [0.1, 0.9, 0.1], [0.0, 0.1, 0.9]]


def pixels(path):
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB")).astype(int)


def test_matrices_are_drawn_beside_each_other(tmp_path):
    draw_accuracy_matrices(tmp_path / "one.png", {"kept": KEPT})
    draw_accuracy_matrices(tmp_path / "pictures" / "five.png", dict.fromkeys("abcde", LOST), columns=3)
    one, five = pixels(tmp_path / "one.png"), pixels(tmp_path / "pictures" / "five.png")
    assert five.shape[0] > 1.8 * one.shape[0], "two rows of panels"
    yellow = (one[..., 0] > 180) & (one[..., 2] < 80)
    assert yellow.sum() > 1000, "high accuracies are bright"


def test_curves_are_means_over_the_tasks_learned_so_far(tmp_path):
    path = tmp_path / "curves.png"
    draw_average_accuracies(path, {"split": {"kept": [KEPT, KEPT], "lost": [LOST, LOST]}, "permuted": {"kept": [KEPT]}})
    drawn = pixels(path)
    blue = (drawn[..., 2] - drawn[..., 0] > 100).sum()
    orange = (drawn[..., 0] - drawn[..., 2] > 150).sum()
    assert blue > orange > 100, "one in both panels, the other in one"
