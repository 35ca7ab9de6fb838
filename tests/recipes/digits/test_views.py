"""Views are functions of the visit, and of nothing else."""

from __future__ import annotations

import torch

from autoencoder.labels import FewLabels
from digits.affine import AffineRange
from digits.views import Views, blanked
from toolkit.data.table import TensorTable

COUNT = 60


def views(seed: int = 3) -> Views:
    draws = torch.Generator().manual_seed(0)
    table = TensorTable(
        input=torch.randint(0, 256, (COUNT, 12, 12), dtype=torch.uint8, generator=draws),
        label=torch.arange(COUNT) % 4,
    )
    few = FewLabels(table, 8, num_classes=4, seed=seed)
    weak, strong = AffineRange(degrees=0.0, scale=0.0, shear=0.0, shift=1.0), AffineRange()
    return Views(few, weak=weak, strong=strong, labelled=strong, blank=4, seed=seed)


def seen(of: Views, visits: torch.Tensor) -> dict[str, torch.Tensor]:
    return of(of.few.table[visits % COUNT], visits)


def test_views_are_a_function_of_seed_and_visit():
    visits = torch.randperm(5 * COUNT, generator=torch.Generator().manual_seed(1))[:40]
    whole, again = seen(views(), visits), seen(views(), visits)
    parts = [seen(views(), part) for part in (visits[:7], visits[7:7], visits[7:])]
    for name, column in whole.items():
        assert torch.equal(column, again[name])
        # Pixels are rounded to whole grey values.
        assert (column.int() - torch.cat([part[name] for part in parts]).int()).abs().max() <= 1, name
    other = seen(views(seed=4), visits)
    images = views().few.table[visits % COUNT]["input"]
    assert not torch.equal(other["strong"], whole["strong"])
    for name in ("input", "strong"):
        same = (whole[name] == images).flatten(1).all(1)
        assert same.float().mean() < 0.2, "other views than the image"
    lone = views()
    lone.strong = None
    assert "strong" not in seen(lone, visits)
    first, second = (seen(views(), torch.arange(COUNT) + epoch * COUNT) for epoch in (0, 1))
    assert (first["strong"] != second["strong"]).flatten(1).any(1).all(), "another view at each visit"


def test_the_black_square_has_its_side_and_place():
    images = torch.full((3, 12, 12), 9, dtype=torch.uint8)
    centres = torch.tensor([[0.0, 0.0], [-1.0, -1.0], [0.5, -0.5]])  # the middle, a corner, (9, 3)
    black = blanked(images, centres, 4) == 0
    assert black.sum((1, 2)).tolist() == [16, 4, 16]
    assert black[0, 4:8, 4:8].all()
    assert black[1, :2, :2].all()
    assert black[2, 7:11, 1:5].all()
