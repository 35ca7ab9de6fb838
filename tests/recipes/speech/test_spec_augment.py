"""What SpecAugment hides, and that it does not depend on who looks."""

import torch

from speech.spec_augment import SpecAugment


def batch(lengths: list[int], bands: int = 20) -> dict[str, torch.Tensor]:
    return {"input": torch.ones(len(lengths), max(lengths), bands), "input_length": torch.tensor(lengths)}


def hidden(visits: torch.Tensor, lengths: list[int], **settings) -> torch.Tensor:
    augment = SpecAugment(torch.zeros(20), seed=0, **settings)
    return augment(batch(lengths), visits)["input"] == 0


def test_what_is_hidden_is_a_function_of_the_visit():
    visits, lengths = torch.arange(6), [40] * 6
    whole = hidden(visits, lengths)
    parts = [hidden(visits[i : i + 2], lengths[:2]) for i in (0, 2, 4)]
    assert torch.equal(torch.cat(parts), whole)
    assert not torch.equal(whole[0], hidden(visits[:1] + 6, [40])[0])


def test_bands_and_frames_are_hidden_as_wholes_and_no_more_than_allowed():
    found = hidden(torch.arange(500), [40] * 500, masks=1, band_fraction=0.25, time_fraction=0.2)
    bands, frames = found.all(1).sum(1), found.all(2).sum(1)
    assert bands.max() == 5 - 1  # a fraction below 1 of five bands, rounded down
    assert frames.max() == 8 - 1
    assert bands.float().mean() > 1
    rest = found & ~found.all(1)[:, None] & ~found.all(2)[..., None]
    assert not rest.any()


def test_filling_beyond_an_utterance_takes_no_share_of_what_is_hidden():
    short = hidden(torch.arange(200), [10] * 200, masks=1, band_fraction=0.0, time_fraction=0.5)
    filled = hidden(torch.arange(200), [10] * 199 + [40], masks=1, band_fraction=0.0, time_fraction=0.5)
    assert torch.equal(filled[:199, :10], short[:199])
    assert not filled[:199, 10:].any()


def test_what_is_hidden_is_the_mean_of_its_band():
    fill = torch.arange(20.0)
    found = SpecAugment(fill, seed=0, band_fraction=0.5)({**batch([30])}, torch.tensor([3]))["input"]
    assert ((found == 1) | (found == fill)).all()


def test_a_shifted_voice_is_the_same_voice_some_bands_away():
    ramp = {"input": torch.arange(20.0).expand(300, 4, 20), "input_length": torch.full((300,), 4)}
    augment = SpecAugment(torch.zeros(20), seed=0, band_fraction=0.0, time_fraction=0.0, shift=2.0)
    moved = augment(ramp, torch.arange(300))["input"]
    shifts = torch.arange(20.0)[10] - moved[:, 0, 10]
    assert shifts.abs().max() <= 2
    assert shifts.min() < -1.5
    assert shifts.max() > 1.5
    torch.testing.assert_close(
        moved[:, :, 3:-3], (torch.arange(20.0) - shifts[:, None, None]).expand(300, 4, 20)[:, :, 3:-3]
    )
