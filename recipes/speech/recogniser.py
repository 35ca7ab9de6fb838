"""A trained recogniser: saved as a folder, and applied to a stream.

recogniser/config.json          features, vocabulary, sizes
recogniser/model.safetensors    weights
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

import toolkit as tk
from speech.audio import LogMel
from speech.characters import Characters
from speech.speech_models import MemoryEncoder, SpeechRecogniser, Standardise, States

CONFIG, WEIGHTS = "config.json", "model.safetensors"


@dataclass(frozen=True)
class Recogniser:
    """A causal model of characters, with its features and vocabulary."""

    model: SpeechRecogniser
    features: LogMel
    characters: Characters
    stride: int
    """Frames per step of the model."""
    tail_s: float
    """Seconds of silence after each utterance in training."""

    def listen(self) -> Listener:
        """Begin a stream."""
        return Listener(self)

    def transcribe(self, samples: np.ndarray) -> str:
        """Transcribe samples (N,) at `features.sample_rate`, all at once."""
        listener = self.listen()
        return listener.hear(samples) + listener.finish()


class Listener:
    """Streaming recogniser: memory and features are kept between chunks of any size. The text of a stream equals
    best-path decoding of all samples at once.
    """

    def __init__(self, recogniser: Recogniser):
        self.recogniser = recogniser
        self._sound = torch.zeros(0)
        self._frames = torch.zeros(0, recogniser.features.num_mels)
        self._states: States | None = None
        self._last = recogniser.characters.blank

    @torch.inference_mode()
    def hear(self, samples: np.ndarray) -> str:
        """Return the new final characters for the next samples (N,)."""
        features, characters = self.recogniser.features, self.recogniser.characters
        self._sound = torch.cat([self._sound, torch.from_numpy(np.asarray(samples, np.float32))])
        frames = features(self._sound)
        self._sound = self._sound[len(frames) * features.hop :]
        self._frames = torch.cat([self._frames, frames])
        stride = self.recogniser.stride
        ready = len(self._frames) // stride * stride
        if ready == 0:
            return ""
        # Rounded as the training data were.
        log_probs, self._states = self.recogniser.model.advance(self._frames[None, :ready].half(), self._states)
        self._frames = self._frames[ready:]
        new = []
        for label in log_probs[0].argmax(-1).tolist():
            if label not in (self._last, characters.blank):
                new.append(label)
            self._last = label
        return characters.decode(new)

    def finish(self) -> str:
        """Return the remaining characters, after appending silence."""
        rate = self.recogniser.features.sample_rate
        return self.hear(np.zeros(round(self.recogniser.tail_s * rate), np.float32))


def save_recogniser(folder: Path, model: nn.Module, features: LogMel, characters: Characters, tail_s: float) -> bool:
    """Write a model for `load_recogniser`; returns False and writes nothing if the model is not causal."""
    if not isinstance(model, SpeechRecogniser) or not isinstance(model.encoder, MemoryEncoder):
        return False
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "features": asdict(features),
        "vocabulary": characters.vocabulary,
        "tail_s": tail_s,
        "encoder": model.encoder.sizes,
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file({name: value.cpu().contiguous() for name, value in model.state_dict().items()}, folder / WEIGHTS)
    return True


def load_recogniser(folder: Path) -> Recogniser:
    """Read the files of `save_recogniser`. Raises UserError for others."""
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        features = LogMel(**config["features"])
        characters = Characters(config["vocabulary"])
        sizes = config["encoder"] | {"thetas": tuple(config["encoder"]["thetas"])}
        bands = torch.ones(features.num_mels)
        encoder = MemoryEncoder(features.num_mels, **sizes)
        model = SpeechRecogniser(Standardise(bands, bands), encoder, len(characters))
        model.load_state_dict(load_file(folder / WEIGHTS))
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise tk.UserError(f"{folder} holds no recogniser ({error}): take the folder that a run left behind.") from None
    return Recogniser(model.eval(), features, characters, encoder.stride, config["tail_s"])
