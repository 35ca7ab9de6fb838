"""Sound files to samples, samples to features."""

import io
import math
import sys
import wave

import numpy as np
import pytest
import torch

from speech.audio import LogMel, decode, resample
from tests.recipes.speech.sounds import encode_wav
from toolkit.errors import UserError

RATE = 8000


def tone(frequency: float, seconds: float = 0.5, rate: int = RATE) -> np.ndarray:
    return (0.5 * np.sin(2 * math.pi * frequency * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


def wav(data: bytes, width: int, channels: int = 1) -> bytes:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(RATE)
        file.writeframes(data)
    return buffer.getvalue()


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
def test_wav_of_every_width_is_read_without_a_codec(data, width, monkeypatch):
    monkeypatch.setitem(sys.modules, "soundfile", None)
    samples, rate = decode(wav(data, width), "a.wav")
    assert rate == RATE
    assert samples.tolist() == [-1, -0.5, 0, 0.5]


def at_rate(rate: int) -> bytes:
    content = bytearray(wav(bytes(200), 2))
    content[24:28] = rate.to_bytes(4, "little")
    return bytes(content)


def shorter(content: bytes, claimed: int) -> bytes:
    return content[:40] + claimed.to_bytes(4, "little") + content[44:]


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (wav(bytes(200), 2)[:-100], "a.wav has 100 of 200 bytes of sound: copy it again."),
        (shorter(wav(b"\x07" * 200, 2), 100), "a.wav has 100 bytes after the 100 bytes of sound: copy it again."),
        (wav(b"", 2), "a.wav has no samples"),
        (at_rate(0), "a.wav claims 0 samples per second"),
        (at_rate(4_000_000_000), "a.wav claims 4,000,000,000 samples per second, which is not from 1,000 to 1,000,000"),
    ],
)
def test_a_wav_that_lost_its_sound_or_its_rate_is_refused(content, fault):
    with pytest.raises(UserError, match=fault):
        decode(content, "a.wav")


def test_a_wav_that_was_written_to_a_pipe_may_claim_any_length():
    content = bytearray(wav(bytes(200), 2))
    content[40:44] = (0xFFFFFFFF).to_bytes(4, "little")
    assert len(decode(bytes(content), "a.wav")[0]) == 100


def test_decode_wav_with_chunk_after_the_sound():
    assert len(decode(wav(bytes(200), 2) + b"LIST\4\0\0\0INFO", "a.wav")[0]) == 100


def test_channels_are_averaged():
    samples, _ = decode(wav(np.array([2**14, 0, -(2**14), 0], "<i2").tobytes(), 2, channels=2), "a.wav")
    assert samples.tolist() == [0.25, -0.25]


def test_flac_is_read_by_soundfile():
    import soundfile

    buffer = io.BytesIO()
    soundfile.write(buffer, tone(440), RATE, format="FLAC")
    samples, rate = decode(buffer.getvalue(), "a.flac")
    assert rate == RATE
    np.testing.assert_allclose(samples, tone(440), atol=1e-4)


def test_without_soundfile_flac_ends_in_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(UserError, match=r"a\.flac is no plain PCM WAV.*pip install 'moe-toolkit\[speech\]'"):
        decode(b"fLaC....", "a.flac")


def test_what_is_no_sound_ends_in_one_sentence():
    with pytest.raises(UserError, match=r"a\.wav cannot be read as sound"):
        decode(b"RIFF....WAVEjunk", "a.wav")


def test_written_samples_are_read_again():
    samples, rate = decode(encode_wav(tone(300), RATE), "a.wav")
    assert rate == RATE
    np.testing.assert_allclose(samples, tone(300), atol=1e-4)


def test_resampling_keeps_a_tone():
    found = resample(tone(440, rate=16000), 16000, RATE)
    np.testing.assert_allclose(found[200:-200], tone(440)[200:-200], atol=0.01)
    assert resample(found, RATE, RATE) is found


def test_the_strongest_band_of_a_tone_is_the_one_around_it():
    features = LogMel()
    for frequency in (300, 1000, 2500):
        band = features(torch.from_numpy(tone(frequency))).mean(0).argmax().item()
        mel = 2595 * math.log10(1 + frequency / 700)
        spacing = 2595 * math.log10(1 + RATE / 2 / 700) / (features.num_mels + 1)
        assert abs(band - (mel / spacing - 1)) <= 1


def test_sound_in_pieces_gives_the_features_of_the_whole():
    features, sound = LogMel(), torch.from_numpy(tone(500) * np.linspace(0, 1, 4000, dtype=np.float32))
    rest, parts = torch.zeros(0), []
    for piece in sound.split([30, 500, 1, 2000, 1469]):
        rest = torch.cat([rest, piece])
        parts.append(features(rest))
        rest = rest[len(parts[-1]) * features.hop :]
    torch.testing.assert_close(torch.cat(parts), features(sound))
    assert len(torch.cat(parts)) == (4000 - features.window) // features.hop + 1


def test_silence_has_the_features_of_the_floor():
    assert LogMel()(torch.zeros(400)).unique().tolist() == [pytest.approx(math.log(1e-3))]
