"""Speech as tables of log-mel features and characters, computed once and mapped by every process."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import toolkit as tk
from speech import speech_sources as sources
from speech.audio import LogMel, resample
from speech.characters import Characters, min_frames
from speech.speech_sources import Source, Utterance

CACHE_FORMAT = 2
"""Version of the cached content."""
KNOWN = ("auto", "fsdd", "connected_digits", "librispeech", "gigaspeech", "manifest", "tones")
SPLITS = ("train", "test", "validation")
CONNECTED = {"train": 4000, "test": 500}
"""How many utterances of connected digits are made."""


@dataclass(frozen=True)
class SpeechData:
    """Two tables with the columns "input" (frames, num_mels) and "target" (characters), both ragged, "label" (the
    digit, else -1) and "speaker" (an index into `speakers`)."""

    name: str
    train: tk.data.RaggedTable
    test: tk.data.RaggedTable
    mean: Tensor
    """(num_mels,) of the training frames."""
    std: Tensor
    speakers: tuple[str, ...]
    notice: str | None = None
    """A sentence for the user, when this is not the set that was wished for, or not all of it."""
    validation: tk.data.RaggedTable | None = None
    """Utterances that are neither trained nor tested on, for choices."""

    @property
    def num_mels(self) -> int:
        return len(self.mean)

    def num_digits(self) -> int:
        """Return the number of classes. Raises UserError if an utterance is not a single digit."""
        labels = self.train.columns["label"]
        if int(labels.min()) < 0:
            raise tk.UserError(f"target='digits': {self.name} is not made of single digits: use target='characters'.")
        return int(labels.max()) + 1

    def words(self, space: int) -> set[tuple[int, ...]]:
        """Return the words of training transcripts, as ids of characters."""
        target = self.train.ragged["target"]
        every = target.values.tolist()
        places = zip(target.starts.tolist(), target.lengths.tolist(), strict=True)
        apart = (itertools.groupby(every[start : start + n], lambda label: label != space) for start, n in places)
        return {tuple(word) for text in apart for is_word, word in text if is_word}

    def hold_out(self, speaker: str) -> SpeechData:
        """Train on all recordings of the other speakers, test on all of `speaker`'s. Raises UserError for an unknown
        speaker."""
        if speaker not in self.speakers:
            raise tk.UserError(f"held_out_speaker={speaker!r}: take one of {', '.join(self.speakers)}.")
        every = self.train.joined(self.test)
        theirs = every.columns["speaker"] == self.speakers.index(speaker)
        train = every.select((~theirs).nonzero()[:, 0])
        test = every.select(theirs.nonzero()[:, 0])
        return replace(self, name=f"{self.name} without {speaker}", train=train, test=test)


def load_speech(
    dataset: str,
    data_dir: Path | None,
    *,
    features: LogMel,
    characters: Characters,
    tail_s: float,
    stride: int,
    held_out_speaker: str | None = None,
    validation: bool = False,
    on_main: tk.data.OnMain,
) -> SpeechData:
    """Load a set of utterances.

    Utterances that do not fit, because CTC needs more steps of `stride` frames or a character is unknown, are left out,
    and the notice says how many.

    Args:
        dataset: "fsdd" (or "fsdd:validation", which tests on a part of its training split), "connected_digits",
            "librispeech", "gigaspeech" (with ":s" or the like for another subset), "manifest", "tones"; "auto": spoken
            digits if available, else tones; or a set of your own, see `speech_sources.find_own`.
        data_dir: The folder of the set; None is $TOOLKIT_DATA_DIR.
        features: Makes frames of sound.
        characters: The vocabulary of transcripts.
        tail_s: Seconds of silence after each utterance, so that a causal model has time to output the last characters.
        stride: Frames per step of the model.
        held_out_speaker: Test on this speaker only, and train on the others.
        validation: Hold out a part of the training utterances, too: the split `validation` of a set that has one,
            else a tenth, always the same.
        on_main: `Run.on_main_and_share`.

    Returns:
        Its two tables, and the facts that a model needs.

    Raises:
        UserError: On every rank, the set is not there or cannot be read.
    """
    settings = hashlib.sha256(repr((features, characters, tail_s, stride)).encode()).hexdigest()[:12]

    def find() -> tk.data.Source:
        source, notice = _choose(dataset, data_dir)
        key = f"{source.name}-{source.key}-{settings}-v{CACHE_FORMAT}".replace("/", "-")
        return tk.data.Source(source.name, key, lambda: _build(source, features, characters, tail_s, stride), notice)

    _, notice, built = tk.data.shared_columns(dataset, find, on_main)
    name, *speakers = tk.data.words_of(built["names"])
    left_out, total = built["left_out"].tolist()
    if left_out:
        dropped = f"{left_out} of {total} utterances were left out: text empty, not in the vocabulary, or too long."
        notice = f"{notice} {dropped}" if notice else dropped
    tables = {
        split: tk.data.RaggedTable(
            input=tk.data.RaggedColumn.packed(built[f"{split}_input"], built[f"{split}_input_length"]),
            target=tk.data.RaggedColumn.packed(built[f"{split}_target"], built[f"{split}_target_length"]),
            label=built[f"{split}_label"],
            speaker=built[f"{split}_speaker"],
        )
        for split in SPLITS
        if f"{split}_label" in built
    }
    data = SpeechData(name, tables["train"], tables["test"], built["mean"], built["std"], tuple(speakers), notice)
    if held_out_speaker is not None:
        data = data.hold_out(held_out_speaker)
    if not validation:
        return data
    if "validation" in tables and held_out_speaker is None:
        return replace(data, validation=tables["validation"])
    rows = torch.randperm(len(data.train), generator=tk.generator(0, "validation utterances"))
    cut = max(1, len(rows) // 10)
    return replace(data, train=data.train.select(rows[cut:].sort().values), validation=data.train.select(rows[:cut]))


def _choose(dataset: str, data_dir: Path | None) -> tuple[Source, str | None]:
    name, _, subset = dataset.partition(":")
    try:
        if name not in KNOWN and tk.data.is_own(dataset):
            return sources.find_own(dataset)
        if name == "tones":
            return sources.tones(), "Synthetic tones instead of speech: only to try things out."
        if name == "auto":
            try:
                return sources.find_digits(tk.data.data_folder(data_dir)), None
            except tk.data.NotFoundHere:
                if data_dir is not None:
                    raise
                return sources.tones(), "No spoken digits (dataset='fsdd' says why): training on synthetic tones."
        if name == "fsdd":
            digits = sources.find_digits(tk.data.data_folder(data_dir))
            return (sources.validation(digits) if subset == "validation" else digits), None
        if name == "connected_digits":
            return sources.connect(sources.find_digits(tk.data.data_folder(data_dir)), CONNECTED), None
        if name == "manifest":
            return sources.find_manifest(tk.data.data_folder(data_dir)), None
        if name in ("librispeech", "gigaspeech"):
            try:
                if name == "librispeech":
                    return sources.find_librispeech(tk.data.data_folder(data_dir)), None
                return sources.find_gigaspeech(tk.data.data_folder(data_dir), subset or "xs"), None
            except tk.data.NotFoundHere:
                if data_dir is not None:
                    raise
                return sources.on_hub(name, subset or None), None
    except tk.data.NotFoundHere as reason:
        raise tk.UserError(f"dataset={dataset!r}: {reason}; give data_dir with the folder that does.") from None
    raise tk.UserError(
        f"dataset={dataset!r}: there is no such set; choose one of {', '.join(KNOWN)}, a folder, or owner/name of the "
        "Hub."
    )


# --- features --------------------------------------------------------------------------------------------------------


def _build(
    source: Source, features: LogMel, characters: Characters, tail_s: float, stride: int
) -> Mapping[str, np.ndarray]:
    speakers: dict[str, int] = {}
    columns: dict[str, np.ndarray] = {}
    left_out = total = 0
    for split in source.splits:
        frames, targets, labels, voices = [], [], [], []
        for utterance in _at_rate(source.read(split), features.sample_rate):
            total += 1
            sound = np.pad(utterance.samples, (0, round(tail_s * features.sample_rate)))
            mel = features(torch.from_numpy(sound))
            text = characters.normalise(utterance.text)
            if not text or characters.unknown(text) or min_frames(text) > len(mel) // stride:
                left_out += 1
                continue
            frames.append(mel.half().numpy())
            targets.append(np.array(characters.encode(text)))
            labels.append(utterance.label)
            voices.append(speakers.setdefault(utterance.speaker, len(speakers)))
        if not frames:
            raise tk.UserError(
                f"{source.name} holds no utterance to {split} with: check the folder and the vocabulary."
            )
        columns |= {
            f"{split}_input": np.concatenate(frames),
            f"{split}_input_length": np.array([len(frame) for frame in frames]),
            f"{split}_target": np.concatenate(targets),
            f"{split}_target_length": np.array([len(target) for target in targets]),
            f"{split}_label": np.array(labels),
            f"{split}_speaker": np.array(voices),
        }
    every = columns["train_input"].astype(np.float64)
    return columns | {
        "mean": every.mean(0),
        "std": every.std(0).clip(min=1e-3),
        "left_out": np.array([left_out, total]),
        "names": tk.data.words_column([source.name, *speakers]),
    }


def _at_rate(utterances: Iterator[Utterance], rate: int) -> Iterator[Utterance]:
    for utterance in utterances:
        samples = np.ascontiguousarray(resample(utterance.samples, utterance.rate, rate), dtype=np.float32)
        yield Utterance(samples, rate, utterance.text, utterance.speaker, utterance.label)
