"""Random tensors and sound files."""

import io
import wave

import numpy as np
import torch


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def wav(data, rate=8000, *, width=2, channels=1):
    """Return a WAV file of the bytes `data` with `width` bytes per sample."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(data)
    return buffer.getvalue()


def encode_wav(samples, rate):
    """Return a 16-bit mono WAV file of samples (N,) from -1 to 1."""
    return wav((np.clip(samples, -1, 1) * 32767).round().astype("<i2").tobytes(), rate)
