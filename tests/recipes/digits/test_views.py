"""Affine maps, and augmented views of sample accesses."""

import torch

from autoencoder.labels import FewLabels
from digits.affine import AffineRange, warp
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


IMAGES = torch.randint(0, 256, (12, 28, 28), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
QUARTER = AffineRange(degrees=90.0, scale=0.5, shear=0.5, shift=4.0)


def draws(**values):
    names = ("angle", "scale", "shear", "x", "y")
    return torch.tensor([values.get(name, 0.0) for name in names]).expand(len(IMAGES), -1)


def test_each_draw_changes_image_as_named():
    """Shifts by pixels and rotations by right angles need no interpolation."""
    inside = torch.zeros_like(IMAGES)
    inside[:, 6:22, 6:22] = IMAGES[:, 6:22, 6:22]
    assert torch.equal(warp(inside, draws(), QUARTER), inside)
    assert torch.equal(warp(inside, draws(angle=1.0), QUARTER), inside.rot90(1, (1, 2)))
    assert torch.equal(warp(inside, draws(x=1.0), QUARTER), inside.roll(-4, 2))
    assert torch.equal(warp(inside, draws(y=-0.5), QUARTER), inside.roll(2, 1))
    black = int((inside == 0).sum())
    assert int((warp(inside, draws(scale=1.0), QUARTER) == 0).sum()) > black, "smaller"
    assert int((warp(inside, draws(scale=-1.0), QUARTER) == 0).sum()) < black, "larger"
    slanted = warp(inside, draws(shear=1.0), QUARTER)
    rows = (slanted > 0).float().argmax(2)
    assert (rows[:, 8] - rows[:, 19] >= 4).all(), "upper rows are further right than lower rows"


def test_warp_does_not_depend_on_batch():
    values = (2 * torch.rand(12, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64) - 1).float()
    batch = warp(IMAGES, values, AffineRange()).int()
    parts = [warp(IMAGES[rows], values[rows], AffineRange()) for rows in torch.arange(12).split([5, 0, 7])]
    assert (batch - torch.cat(parts).int()).abs().max() <= 1, "equal up to rounding"
