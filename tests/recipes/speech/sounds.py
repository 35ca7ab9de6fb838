"""Sound files that tests make."""

from __future__ import annotations

import io
import wave

import numpy as np


def encode_wav(samples: np.ndarray, rate: int) -> bytes:
    """16-bit mono WAV of samples (N,) from -1 to 1."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((np.clip(samples, -1, 1) * 32767).round().astype("<i2").tobytes())
    return buffer.getvalue()
