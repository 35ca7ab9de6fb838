"""Sound files to samples, and samples to log-mel features: no codec library for WAV, `soundfile` for the rest."""

from __future__ import annotations

import io
import math
import re
import wave
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

import toolkit as tk

if TYPE_CHECKING:
    from jaxtyping import Float

RATES_HZ = (1_000, 1_000_000)
STREAMED = 0x7FFF0000
"""A WAV that was written to a pipe claims at least so many bytes, because its length was not known."""


def decode(content: bytes, name: str | Path) -> tuple[np.ndarray, int]:
    """Decode to mono samples (N,) float32 from -1 to 1, and their rate in Hz. Raises UserError naming the file, also
    for no samples, samples that are not finite, or a rate outside `RATES_HZ`.
    """
    samples, rate = _decode_any(content, name)
    fault = None
    if not len(samples):
        fault = "has no samples"
    elif not np.isfinite(samples).all():
        fault = "has a sample that is not finite"
    elif not RATES_HZ[0] <= rate <= RATES_HZ[1]:
        fault = f"claims {rate:,} samples per second, which is not from {RATES_HZ[0]:,} to {RATES_HZ[1]:,}"
    if fault:
        raise tk.UserError(f"{name} {fault}: replace the file.")
    return samples, rate


def _decode_any(content: bytes, name: str | Path) -> tuple[np.ndarray, int]:
    try:
        return _decode_wav(content, name)
    except tk.UserError:
        raise
    except (wave.Error, EOFError, ValueError):  # another format, or a kind of WAV that the standard library has not
        pass
    try:
        import soundfile
    except ImportError:
        raise tk.UserError(
            f"{name} is no plain PCM WAV, and soundfile, which reads FLAC, Ogg and the rest, is missing: "
            "pip install 'moe-toolkit[speech]'."
        ) from None
    try:
        samples, rate = soundfile.read(io.BytesIO(content), dtype="float32", always_2d=True)
    except Exception as error:
        raise tk.UserError(f"{name} cannot be read as sound ({error}): replace the file.") from None
    return samples.mean(1), rate


def _decode_wav(content: bytes, name: str | Path) -> tuple[np.ndarray, int]:
    stream = io.BytesIO(content)
    with wave.open(stream) as file:
        rate = file.getframerate()
        channels = file.getnchannels()
        width = file.getsampwidth()
        claimed = file.getnframes() * channels * width
        data = file.readframes(file.getnframes())
        rest = content[stream.tell() + claimed % 2 :].strip(b"\0")
    if len(data) < claimed < STREAMED:
        raise tk.UserError(f"{name} has {len(data):,} of {claimed:,} bytes of sound: copy it again.")
    if rest and not re.match(rb"[ -~]{4}", rest):  # the identifier of the next chunk
        raise tk.UserError(f"{name} has {len(rest):,} bytes after the {claimed:,} bytes of sound: copy it again.")
    data = data[: len(data) // (channels * width) * channels * width]
    if width == 1:  # the one width that WAV stores unsigned
        samples = (np.frombuffer(data, np.uint8).astype(np.float32) - 128) / 128
    elif width == 3:
        triples = np.frombuffer(data, np.uint8).reshape(-1, 3)
        wide = np.zeros((len(triples), 4), np.uint8)
        wide[:, 1:] = triples
        samples = wide.view("<i4")[:, 0].astype(np.float32) / 2**31
    else:
        samples = np.frombuffer(data, f"<i{width}").astype(np.float32) / 2 ** (8 * width - 1)
    return samples.reshape(-1, channels).mean(1), rate


def resample(samples: np.ndarray, rate: int, to_rate: int) -> np.ndarray:
    """Samples (N,) at another rate in Hz, by a polyphase filter."""
    if rate == to_rate:
        return samples
    from scipy.signal import resample_poly

    common = math.gcd(rate, to_rate)
    return resample_poly(samples, to_rate // common, rate // common).astype(np.float32)


@dataclass(frozen=True)
class LogMel:
    """Samples to log-mel features: a frame per hop depends only on its window, so that sound can be streamed."""

    sample_rate: int = 8000
    """Hz."""
    num_mels: int = 40
    window_s: float = 0.025
    hop_s: float = 0.010
    floor: float = 1e-3
    """Added to the power of a band before the logarithm: about the noise of an 8-bit recording."""

    @property
    def window(self) -> int:
        """Samples per frame."""
        return round(self.window_s * self.sample_rate)

    @property
    def hop(self) -> int:
        """Samples from one frame to the next."""
        return round(self.hop_s * self.sample_rate)

    @cached_property
    def fft_size(self) -> int:
        return 2 ** math.ceil(math.log2(self.window))

    @cached_property
    def filters(self) -> Tensor:
        """(frequencies, num_mels): triangles of equal width on the scale 2595 log10(1 + f / 700)."""
        top = 2595 * math.log10(1 + self.sample_rate / 2 / 700)
        corners = 700 * (10 ** (torch.linspace(0, top, self.num_mels + 2, dtype=torch.float64) / 2595) - 1)
        frequency = torch.linspace(0, self.sample_rate / 2, self.fft_size // 2 + 1, dtype=torch.float64)[:, None]
        left = corners[:-2]
        middle = corners[1:-1]
        right = corners[2:]
        rise = (frequency - left) / (middle - left)
        fall = (right - frequency) / (right - middle)
        return torch.minimum(rise, fall).clamp(min=0).float()

    @cached_property
    def taper(self) -> Tensor:
        return torch.hann_window(self.window)

    def __call__(self, samples: Float[Tensor, " N"]) -> Float[Tensor, "T M"]:
        """Map (N,) to (frames, num_mels); samples after the last window are dropped."""
        if len(samples) < self.window:
            return samples.new_zeros(0, self.num_mels)
        frames = samples.unfold(0, self.window, self.hop) * self.taper
        power = torch.fft.rfft(frames, self.fft_size).abs().square()
        return (power @ self.filters + self.floor).log()
