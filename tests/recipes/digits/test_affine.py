"""Random affine maps of images."""

import torch

from digits.affine import AffineRange, warp

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
