"""`transcribe.py`: streams and errors."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from benchmarks.support.processes import program_environment
from speech import transcribe
from speech.audio import LogMel
from speech.characters import Characters
from speech.decoding import best_path
from speech.recogniser import load_recogniser, save_recogniser
from speech.speech_models import MemoryEncoder, SpeechClassifier, SpeechRecogniser, Standardise
from speech.transcribe import main
from tests.recipes.speech.sounds import encode_wav
from toolkit.errors import EXIT_DONE, EXIT_USER_ERROR

FEATURES, CHARACTERS = LogMel(num_mels=12), Characters("AB ")


@pytest.fixture
def model():
    torch.manual_seed(0)
    bands = torch.ones(12)
    encoder = MemoryEncoder(12, 8, channels=2, order=4, thetas=(6.0,))
    model = SpeechRecogniser(Standardise(-3 * bands, bands), encoder, len(CHARACTERS)).eval()
    torch.nn.init.normal_(model.head.weight, std=3)
    return model


@pytest.fixture
def folder(tmp_path, model):
    assert save_recogniser(tmp_path / "run" / "recogniser", model, FEATURES, CHARACTERS, 0.1)
    return tmp_path / "run"


def sound():
    """Return a second of twenty tones."""
    frequency = np.random.default_rng(0).uniform(100, 3500, 20).repeat(400)
    return (0.3 * np.sin(2 * np.pi * np.cumsum(frequency) / 8000)).astype(np.float32)


@torch.inference_mode()
def evaluated(model, samples):
    """Return the best path over the complete recording, as in evaluation."""
    frames = FEATURES(torch.from_numpy(np.pad(samples, (0, 800)))).half()
    log_probs, steps = model(frames[None], torch.tensor([len(frames)]))
    return CHARACTERS.decode(best_path(log_probs, steps, CHARACTERS.blank)[0])


@pytest.mark.parametrize("piece", [37, 400, 8000])
def test_text_of_stream_equals_evaluation(piece, model, folder):
    listener, samples = load_recogniser(folder / "recogniser").listen(), sound()
    text = "".join(listener.hear(samples[i : i + piece]) for i in range(0, len(samples), piece)) + listener.finish()
    assert len(text) > 5
    assert text == evaluated(model, samples)


def test_command_prints_text_and_times(folder, tmp_path, capsys):
    (tmp_path / "a.wav").write_bytes(encode_wav(sound(), 8000))
    assert main([str(folder), str(tmp_path / "a.wav")]) == EXIT_DONE
    text = capsys.readouterr().out
    assert len(text) > 5
    script = [sys.executable, transcribe.__file__, folder / "recogniser", tmp_path / "a.wav", "--json"]
    done = subprocess.run(script, capture_output=True, text=True, check=True, env=program_environment())
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert "".join(line["text"] for line in lines) + "\n" == text
    ends = [line["end_s"] for line in lines]
    assert ends == sorted(ends)
    assert 0 < ends[0] < ends[-1] <= 1


def test_model_that_cannot_stream_is_not_saved(tmp_path, model):
    classifier = SpeechClassifier(model.standardise, model.encoder, 3)
    assert not save_recogniser(tmp_path / "other", classifier, FEATURES, CHARACTERS, 0.1)
    assert not (tmp_path / "other").exists()


def test_invalid_input_exits_with_one_message(folder, tmp_path, capsys):
    (tmp_path / "bad.wav").write_bytes(b"RIFF")
    for words, message in [
        ([tmp_path, tmp_path / "a.wav"], "holds no recogniser"),
        ([folder, tmp_path / "none.wav"], "No such file or directory"),
        ([folder, tmp_path / "bad.wav"], "cannot be read as sound"),
    ]:
        assert main([str(word) for word in words]) == EXIT_USER_ERROR
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    (folder / "recogniser" / "config.json").write_text("{}")
    assert main([str(folder), str(tmp_path / "a.wav")]) == EXIT_USER_ERROR
