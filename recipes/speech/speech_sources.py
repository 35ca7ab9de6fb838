"""Sources of utterances: spoken digits, connected digits made of them, tones, LibriSpeech, GigaSpeech, a manifest.

Each source is a list of (split, utterances) that is read once, while features are computed, and a key that changes with
its files. Sound files are bytes until then; nothing here needs torchcodec.
"""

from __future__ import annotations

import contextlib
import csv
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import toolkit as tk
from speech.audio import decode
from speech.characters import without_tags

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
HUB = {"librispeech": "openslr/librispeech_asr", "gigaspeech": "speechcolab/gigaspeech"}


@dataclass(frozen=True)
class Utterance:
    """One recording and its transcript."""

    samples: np.ndarray
    """(N,) float32, from -1 to 1."""
    rate: int
    """Samples per second."""
    text: str
    speaker: str
    label: int = -1
    """The spoken digit, or -1."""


@dataclass(frozen=True)
class Source:
    """A data set that was found and is not yet read."""

    name: str
    key: str
    """Changes when the files do."""
    read: Callable[[str], Iterator[Utterance]]
    """The utterances of one of `splits`."""
    splits: tuple[str, ...] = ("train", "test")


def _sound(path: Path, folder: Path) -> tuple[np.ndarray, int]:
    """Read samples and rate of a sound file in `folder`. Raises UserError if it is invalid or outside the folder."""
    return decode(tk.data.read_file(path, folder), path)


# --- digits ------------------------------------------------------------------------------------------------------


def find_digits(folder: Path) -> Source:
    """Find the Free Spoken Digit Dataset as Parquet files, or as published: recordings/7_theo_12.wav.

    Recordings 0 to 4 of each digit and speaker are the test set, as the authors define it. Raises NotFoundHere if
    `folder` has neither, and UserError for an unreadable file; reading raises it for a damaged file.
    """
    for place in (folder / "fsdd", folder / "free-spoken-digit-dataset", folder):
        if files := tk.data.parquet_splits(place):
            return Source(
                "fsdd", tk.data.content_key([*files["train"], *files["test"]]), partial(_digits_in_parquet, files)
            )
        if recordings := sorted((place / "recordings").glob("*_*_*.wav")):
            return Source("fsdd", tk.data.content_key(recordings), partial(_digits_in_folder, recordings))
    raise tk.data.NotFoundHere(
        f"{folder} holds neither fsdd/train-*.parquet and fsdd/test-*.parquet nor recordings/*.wav"
    )


def _digits_in_parquet(files: Mapping[str, Sequence[Path]], split: str) -> Iterator[Utterance]:
    for path in files[split]:
        columns = tk.data.read_columns(path, ["audio", "digit", "speaker"])
        for row, (audio, digit, speaker) in enumerate(zip(*columns.values(), strict=True)):
            if audio is None or audio["bytes"] is None or speaker is None:
                raise tk.data.damaged(path, f"has a null in row {row}")
            if digit not in range(len(DIGITS)):
                raise tk.data.damaged(path, f"has the digit {digit} in row {row}, which is not from 0 to 9")
            samples, rate = decode(audio["bytes"], f"row {row} of {path}")
            yield Utterance(samples, rate, DIGITS[digit], speaker, digit)


def _digits_in_folder(recordings: Sequence[Path], split: str) -> Iterator[Utterance]:
    for path in recordings:
        if not re.fullmatch(r"[0-9]_[^_]+_[0-9]+", path.stem):
            raise tk.data.damaged(path, "is not named <digit>_<speaker>_<number>.wav")
        digit, speaker, index = path.stem.split("_")
        if (int(index) < 5) == (split == "test"):
            samples, rate = _sound(path, path.parent)
            yield Utterance(samples, rate, DIGITS[int(digit)], speaker, int(digit))


def validation(digits: Source, recordings: int = 5) -> Source:
    """Split the training set: the first `recordings` of each digit and speaker become the test split."""

    def read(split: str) -> Iterator[Utterance]:
        seen: Counter[tuple[int, str]] = Counter()
        for utterance in digits.read("train"):
            seen[utterance.label, utterance.speaker] += 1
            if (seen[utterance.label, utterance.speaker] <= recordings) == (split == "test"):
                yield utterance

    return Source(f"{digits.name} validation", f"{digits.key}-{recordings}", read)


def connect(digits: Source, counts: dict[str, int]) -> Source:
    """Join 3 to 7 digits of a speaker, with 50 to 350 ms of silence in between; test digits for testing."""

    def read(split: str) -> Iterator[Utterance]:
        draws = np.random.default_rng([20, split == "test"])
        by_speaker: dict[str, list[Utterance]] = {}
        for utterance in digits.read(split):
            by_speaker.setdefault(utterance.speaker, []).append(utterance)
        speakers = sorted(by_speaker)
        for _ in range(counts[split]):
            said = by_speaker[speakers[draws.integers(len(speakers))]]
            chosen = [said[i] for i in draws.integers(len(said), size=draws.integers(3, 8))]
            rate = chosen[0].rate
            pieces = []
            for utterance in chosen:
                gap = np.zeros(int(draws.uniform(0.05, 0.35) * rate), np.float32)
                pieces += [gap, utterance.samples]
            text = " ".join(utterance.text for utterance in chosen)
            yield Utterance(np.concatenate(pieces), rate, text, chosen[0].speaker)

    return Source("connected_digits", f"{digits.key}-{counts['train']}-{counts['test']}", read)


def tones() -> Source:
    """Synthesise stand-ins for spoken digits: two tones of a telephone key, at six pitches, in noise."""

    def read(split: str) -> Iterator[Utterance]:
        draws = np.random.default_rng([21, split == "test"])
        rate = 8000
        for index in range(480 if split == "train" else 120):
            digit = index % 10
            voice = index // 10 % 6
            row, column = (3, 1) if digit == 0 else divmod(digit - 1, 3)
            time = np.arange(int(draws.uniform(0.2, 0.4) * rate)) / rate
            pitch = 0.85 + 0.06 * voice
            low = (697, 770, 852, 941)[row] * pitch
            high = (1209, 1336, 1477)[column] * pitch
            envelope = np.minimum(1, 40 * np.minimum(time, time[-1] - time))
            sound = 0.2 * envelope * (np.sin(2 * math.pi * low * time) + np.sin(2 * math.pi * high * time))
            sound += 0.01 * draws.standard_normal(len(time))
            yield Utterance(sound.astype(np.float32), rate, DIGITS[digit], f"voice {voice}", digit)

    return Source("tones", "2", read)


# --- transcribed speech --------------------------------------------------------------------------------------------


def find_manifest(folder: Path) -> Source:
    """Find train.jsonl and test.jsonl with {"audio": "a.wav", "text": "...", "speaker": "..."} per line.

    Raises NotFoundHere if `folder` does not have both, and UserError for an unreadable file; reading raises it for an
    invalid line or sound.
    """
    manifests = {split: folder / f"{split}.jsonl" for split in ("train", "test")}
    if not all(path.is_file() for path in manifests.values()):
        raise tk.data.NotFoundHere(f"{folder} holds no train.jsonl and test.jsonl")

    def read(split: str) -> Iterator[Utterance]:
        for number, line in enumerate(manifests[split].read_text(encoding="utf-8").splitlines(), start=1):
            try:
                record = json.loads(line)
                if not isinstance(record["text"], str):
                    raise TypeError("its text is no string")
                path = folder / record["audio"]
                samples, rate = _sound(path, folder)
                yield Utterance(samples, rate, record["text"], str(record.get("speaker") or ""))
            except (ValueError, KeyError, TypeError, OSError) as error:
                if isinstance(error, tk.UserError):
                    raise
                raise tk.UserError(
                    f"{manifests[split]}, line {number} is not right ({error}): mend or drop it."
                ) from None

    return Source("manifest", tk.data.content_key([*manifests.values(), *_sounds_of(manifests.values())]), read)


def _sounds_of(manifests: Iterable[Path]) -> list[Path]:
    """Return the existing sound files that `manifests` name; errors are reported when they are read."""
    named = []
    for path in manifests:
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                named.append(path.parent / json.loads(line)["audio"])
    return [path for path in named if path.is_file()]


TEXT = ("text", "transcription", "transcript", "sentence")
SOUNDS = {".wav", ".flac", ".ogg", ".opus", ".mp3"}
SPEAKER = ("speaker", "speaker_id", "client_id")
"""Names of columns of your own recordings."""


def find_own(dataset: str) -> tuple[Source, str | None]:
    """Find recordings of your own: Parquet files or a data set of the Hub with an audio and a text column; or a folder
    of recordings with `metadata.csv`, whose columns are `file_name` and `text`, or with a folder for each word.

    Returns the source, and how it was split if it has no test split. Raises UserError if it cannot be loaded.
    """
    import datasets

    here = Path(dataset).expanduser()
    splits, key = (here.is_dir() and _recordings_in(here)) or tk.data.load_splits(dataset)
    parts, said = tk.data.train_and_test(splits)
    train = parts["train"]
    audio = tk.data.find_column(dataset, train, "sound", ("audio",), (datasets.Audio,))
    text = tk.data.find_column(dataset, train, "text", TEXT, (datasets.ClassLabel,))
    speaker = next((name for name in SPEAKER if name in train.column_names), None)
    kind = train.features[text]
    words = kind.names if isinstance(kind, datasets.ClassLabel) else None

    def read(split: str) -> Iterator[Utterance]:
        rows = parts[split]
        if isinstance(rows.features[audio], datasets.Audio):
            rows = rows.cast_column(audio, datasets.Audio(decode=False))
        for number, row in enumerate(rows):
            where = f"dataset={dataset!r}: row {number} of the {split} split"
            sound = row[audio]
            path = sound if isinstance(sound, str) else sound and sound["path"]
            content = sound["bytes"] if isinstance(sound, dict) else None
            if not (content or path):
                raise tk.UserError(f"{where} has no sound: give the file, or drop the row.")
            content = content or tk.data.read_file(path, *tk.data.folders_of(dataset))
            samples, rate = decode(content, where)
            said = row[text] if words is None else words[row[text]]
            label = -1 if words is None else row[text]
            yield Utterance(samples, rate, str(said or ""), str(row[speaker]) if speaker else "", label)

    name = Path(dataset).name if Path(dataset).exists() else dataset
    return Source(name, key, read, tuple(parts)), said and f"{name}: {said}"


def _recordings_in(folder: Path) -> tuple[Any, str] | None:
    """Return the splits of a folder in the layout of `datasets`' audiofolder, which itself needs torchcodec, and a key
    of its content; None without recordings."""
    import datasets

    sounds = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SOUNDS)
    tables = sorted(folder.rglob("metadata.csv"))
    if not sounds:
        return None
    splits: dict[str, list[dict[str, str]]] = {}
    for table in tables:
        split = table.parent.name if table.parent != folder else "train"
        with table.open(encoding="utf-8", newline="") as file:
            rows = csv.DictReader(file)
            if "file_name" not in (rows.fieldnames or ()):
                raise tk.UserError(f"{table} has no column file_name: name the recording of each row in one.")
            splits[split] = [{**row, "audio": str(table.parent / row["file_name"])} for row in rows]
    if not tables:
        for path in sounds:
            first = path.relative_to(folder).parts[0]
            split = first if first in ("test", "validation") else "train"
            splits.setdefault(split, []).append({"audio": str(path), "text": path.parent.name})
    found = datasets.DatasetDict({split: datasets.Dataset.from_list(each) for split, each in splits.items()})
    if not tables:
        words = sorted({path.parent.name for path in sounds})
        found = found.cast_column("text", datasets.ClassLabel(names=words))
    return found, tk.data.content_key([*tables, *sounds])


def find_librispeech(folder: Path) -> Source:
    """Find LibriSpeech as published: all of train-*/<speaker>/<chapter>/, tested on test-clean or dev-clean.

    Raises NotFoundHere if `folder` does not have both, and UserError for an unreadable file; reading raises it for a
    missing or damaged sound.
    """
    for place in (folder / "LibriSpeech", folder / "librispeech", folder):
        train = sorted(place.glob("train-*/*/*/*.trans.txt"))
        test = sorted(place.glob("test-clean/*/*/*.trans.txt")) or sorted(place.glob("dev-clean/*/*/*.trans.txt"))
        if train and test:
            break
    else:
        raise tk.data.NotFoundHere(f"{folder} holds no LibriSpeech/train-*/ with LibriSpeech/test-clean/ or dev-clean/")
    transcripts = {"train": train, "test": test}

    def read(split: str) -> Iterator[Utterance]:
        for transcript in transcripts[split]:
            for line in transcript.read_text(encoding="utf-8").splitlines():
                name, _, text = line.partition(" ")
                path = transcript.parent / f"{name}.flac"
                if not path.is_file():
                    raise tk.UserError(f"{transcript} speaks of {path.name}, which is not there: unpack the set again.")
                samples, rate = _sound(path, transcript.parent)
                yield Utterance(samples, rate, text, transcript.parent.parent.name)

    return Source("librispeech", tk.data.content_key([*train, *test]), read)


def find_gigaspeech(folder: Path, subset: str) -> Source:
    """Find GigaSpeech as published: GigaSpeech.json and audio/; trains on `subset` (xs, s, m, ...).

    Raises NotFoundHere if `folder` has no GigaSpeech.json, and UserError if it is unreadable; reading raises it for a
    damaged sound.
    """
    index = folder / "GigaSpeech.json"
    if not index.is_file():
        index = folder / "gigaspeech" / "GigaSpeech.json"
    if not index.is_file():
        raise tk.data.NotFoundHere(f"{folder} holds no GigaSpeech.json")
    wanted = {"train": f"{{{subset.upper()}}}", "test": "{TEST}"}

    def read(split: str) -> Iterator[Utterance]:
        for recording in json.loads(index.read_text(encoding="utf-8"))["audios"]:
            segments = [s for s in recording["segments"] if wanted[split] in s["subsets"]]
            if not segments:
                continue
            path = index.parent / recording["path"]
            samples, rate = _sound(path, index.parent)
            for segment in segments:
                begin, end = (round(segment[key] * rate) for key in ("begin_time", "end_time"))
                if text := without_tags(segment["text_tn"]).strip():
                    yield Utterance(samples[begin:end], rate, text, segment.get("speaker", "N/A"))

    return Source(f"gigaspeech-{subset}", tk.data.content_key([index]), read)


def on_hub(name: str, subset: str | None) -> Source:
    """Stream LibriSpeech or GigaSpeech from the Hub; GigaSpeech needs an account that agreed to its terms.

    Reading raises UserError if the Hub does not serve the set.
    """
    import datasets
    from huggingface_hub import constants

    config = subset or {"librispeech": "clean", "gigaspeech": "xs"}[name]
    splits = {"train": "train.100" if name == "librispeech" else "train", "test": "test"}

    def read(split: str) -> Iterator[Utterance]:
        if not constants.HF_HUB_OFFLINE and (unreachable := tk.data.why_out_of_reach()):
            raise tk.UserError(f"dataset={name!r}: {unreachable}: give data_dir with the publisher's folder.")
        try:
            rows = datasets.load_dataset(HUB[name], config, split=splits[split], streaming=True)
            rows = rows.cast_column("audio", datasets.Audio(decode=False))
            for row in rows:
                samples, rate = decode(row["audio"]["bytes"], row["audio"]["path"])
                if text := without_tags(row["text"]).strip():
                    yield Utterance(samples, rate, text, str(row.get("speaker_id", row.get("speaker", ""))))
        except tk.UserError:
            raise
        # The Hub's client, fsspec and datasets raise their own kinds.
        except Exception as error:
            raise tk.UserError(
                f"dataset={name!r}: the Hub does not give {HUB[name]} ({error}): give data_dir with "
                "the publisher's folder, or log in with `hf auth login` if the dataset requires it."
            ) from None

    return Source(f"{name}-{config}", f"hub-{config}", read)
