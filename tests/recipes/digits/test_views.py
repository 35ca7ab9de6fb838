"""Augmented views, a function of seed and sample access."""

import torch

from autoencoder.labels import FewLabels
from digits.affine import AffineRange
from digits.views import Views, blanked
from toolkit.data.table import TensorTable

COUNT = 60
TABLE = TensorTable(
    input=torch.randint(0, 256, (COUNT, 12, 12), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)),
    label=torch.arange(COUNT) % 4,
)
WEAK, STRONG = AffineRange(degrees=0.0, scale=0.0, shear=0.0, shift=1.0), AffineRange()


def views_of(accesses, *, seed=3, strong=STRONG):
    few = FewLabels(TABLE, 8, num_classes=4, seed=seed)
    views = Views(few, weak=WEAK, strong=strong, labelled=STRONG, blank=4, seed=seed)
    return views(few.table[accesses % COUNT], accesses)


def test_views_are_function_of_seed_and_access():
    accesses = torch.randperm(5 * COUNT, generator=torch.Generator().manual_seed(1))[:40]
    batch, again = views_of(accesses), views_of(accesses)
    parts = [views_of(part) for part in accesses.split([7, 0, 33])]
    for name, column in batch.items():
        assert torch.equal(column, again[name])
        difference = (column.int() - torch.cat([part[name] for part in parts]).int()).abs().max()
        assert difference <= 1, f"{name}: pixels are rounded"
    assert not torch.equal(views_of(accesses, seed=4)["strong"], batch["strong"])
    for name in ("input", "strong"):
        unchanged = (batch[name] == TABLE[accesses % COUNT]["input"]).flatten(1).all(1)
        assert unchanged.float().mean() < 0.2
    assert "strong" not in views_of(accesses, strong=None)
    first, second = (views_of(torch.arange(COUNT) + epoch * COUNT) for epoch in (0, 1))
    assert (first["strong"] != second["strong"]).flatten(1).any(1).all()


def test_blanked_square_has_size_and_centre():
    images = torch.full((3, 12, 12), 9, dtype=torch.uint8)
    centres = torch.tensor([[0.0, 0.0], [-1.0, -1.0], [0.5, -0.5]])  # middle, corner, (9, 3)
    black = blanked(images, centres, 4) == 0
    assert black.sum((1, 2)).tolist() == [16, 4, 16]
    assert black[0, 4:8, 4:8].all()
    assert black[1, :2, :2].all()
    assert black[2, 7:11, 1:5].all()
