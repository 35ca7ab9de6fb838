"""Decoding of sound files, features of samples, and SpecAugment."""

import io
import math
import sys

import numpy as np
import pytest
import soundfile
import torch

from speech.audio import LogMel, decode, resample
from speech.spec_augment import SpecAugment
from tests.recipes.speech.sounds import encode_wav, wav
from toolkit.errors import UserError

RATE = 8000


def tone(frequency, seconds=0.5, rate=RATE):
    return (0.5 * np.sin(2 * math.pi * frequency * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


def changed(content, offset, value):
    """Replace an integer of the WAV header."""
    return content[:offset] + value.to_bytes(4, "little") + content[offset + 4 :]


@pytest.mark.parametrize(
    ("data", "width"),
    [
        (bytes([0, 64, 128, 192]), 1),
        (np.array([-(2**15), -(2**14), 0, 2**14], "<i2").tobytes(), 2),
        (b"\0\0\x80" + b"\0\0\xc0" + b"\0\0\0" + b"\0\0\x40", 3),
        (np.array([-(2**31), -(2**30), 0, 2**30], "<i4").tobytes(), 4),
    ],
    ids=["8 bit", "16 bit", "24 bit", "32 bit"],
)
def test_decode_wav_of_every_width_needs_no_codec(data, width, monkeypatch):
    monkeypatch.setitem(sys.modules, "soundfile", None)
    samples, rate = decode(wav(data, width=width), "a.wav")
    assert rate == RATE
    assert samples.tolist() == [-1, -0.5, 0, 0.5]


SOUND, DATA_SIZE, SAMPLE_RATE = wav(bytes(200)), 40, 24


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (SOUND[:-100], "a.wav has 100 of 200 bytes of sound: copy it again."),
        (
            changed(wav(b"\x07" * 200), DATA_SIZE, 100),
            "a.wav has 100 bytes after the 100 bytes of sound: copy it again.",
        ),
        (wav(b""), "a.wav has no samples"),
        (changed(SOUND, SAMPLE_RATE, 0), "a.wav claims 0 samples per second"),
        (
            changed(SOUND, SAMPLE_RATE, 4_000_000_000),
            "a.wav claims 4,000,000,000 samples per second, which is not from 1,000 to 1,000,000",
        ),
        (b"RIFF....WAVEjunk", "a.wav cannot be read as sound"),
        (b"fLaC....", r"a.wav is no plain PCM WAV.*pip install 'moe-toolkit\[speech\]'"),
    ],
)
def test_decode_invalid_file_raises(content, message, monkeypatch):
    if content.startswith(b"fLaC"):
        monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(UserError, match=message):
        decode(content, "a.wav")


@pytest.mark.parametrize(
    "content", [changed(SOUND, DATA_SIZE, 0xFFFFFFFF), SOUND + b"LIST\4\0\0\0INFO"], ids=["from a pipe", "chunk after"]
)
def test_decode_wav_with_unusual_size_reads_all_samples(content):
    assert len(decode(content, "a.wav")[0]) == 100


def test_decode_averages_channels():
    samples, _ = decode(wav(np.array([2**14, 0, -(2**14), 0], "<i2").tobytes(), channels=2), "a.wav")
    assert samples.tolist() == [0.25, -0.25]


@pytest.mark.parametrize("kind", ["FLAC", "WAV"])
def test_decode_returns_encoded_samples(kind):
    buffer = io.BytesIO(encode_wav(tone(440), RATE))
    if kind == "FLAC":
        soundfile.write(buffer, tone(440), RATE, format="FLAC")
    samples, rate = decode(buffer.getvalue(), "a")
    assert rate == RATE
    np.testing.assert_allclose(samples, tone(440), atol=1e-4)


def test_resample_keeps_tone():
    found = resample(tone(440, rate=16000), 16000, RATE)
    np.testing.assert_allclose(found[200:-200], tone(440)[200:-200], atol=0.01)
    assert resample(found, RATE, RATE) is found


def test_strongest_mel_band_of_tone_contains_its_frequency():
    features = LogMel()
    for frequency in (300, 1000, 2500):
        band = features(torch.from_numpy(tone(frequency))).mean(0).argmax().item()
        mel = 2595 * math.log10(1 + frequency / 700)
        spacing = 2595 * math.log10(1 + RATE / 2 / 700) / (features.num_mels + 1)
        assert abs(band - (mel / spacing - 1)) <= 1


def test_features_of_silence_are_floor():
    assert LogMel()(torch.zeros(400)).unique().tolist() == [pytest.approx(math.log(1e-3))]


def masked(accesses, lengths, **settings):
    batch = {"input": torch.ones(len(lengths), max(lengths), 20), "input_length": torch.tensor(lengths)}
    return SpecAugment(torch.zeros(20), seed=0, **settings)(batch, accesses)["input"] == 0


def test_masks_cover_full_bands_and_frames_up_to_limit():
    found = masked(torch.arange(500), [40] * 500, masks=1, band_fraction=0.25, time_fraction=0.2)
    bands, frames = found.all(1).sum(1), found.all(2).sum(1)
    assert bands.max() == 5 - 1  # a fraction below 1 of five bands, rounded down
    assert frames.max() == 8 - 1
    assert bands.float().mean() > 1
    rest = found & ~found.all(1)[:, None] & ~found.all(2)[..., None]
    assert not rest.any()


def test_padding_is_not_masked():
    settings = {"masks": 1, "band_fraction": 0.0, "time_fraction": 0.5}
    short = masked(torch.arange(200), [10] * 200, **settings)
    padded = masked(torch.arange(200), [10] * 199 + [40], **settings)
    assert torch.equal(padded[:199, :10], short[:199])
    assert not padded[:199, 10:].any()


def test_masked_values_are_mean_of_band():
    fill, batch = torch.arange(20.0), {"input": torch.ones(1, 30, 20), "input_length": torch.tensor([30])}
    found = SpecAugment(fill, seed=0, band_fraction=0.5)(batch, torch.tensor([3]))["input"]
    assert ((found == 1) | (found == fill)).all()


def test_shift_moves_bands_by_up_to_limit():
    ramp = {"input": torch.arange(20.0).expand(300, 4, 20), "input_length": torch.full((300,), 4)}
    augment = SpecAugment(torch.zeros(20), seed=0, band_fraction=0.0, time_fraction=0.0, shift=2.0)
    moved = augment(ramp, torch.arange(300))["input"]
    shifts = 10 - moved[:, 0, 10]
    assert shifts.abs().max() <= 2
    assert shifts.min() < -1.5
    assert shifts.max() > 1.5
    expected = (torch.arange(20.0) - shifts[:, None, None]).expand(300, 4, 20)
    torch.testing.assert_close(moved[:, :, 3:-3], expected[:, :, 3:-3])
