"""Speech datasets in their published layouts, as small files."""

import itertools
import json
import os

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import soundfile
import torch

from speech.audio import LogMel
from speech.characters import Characters
from speech.speech import load_speech
from tests.recipes.speech.sounds import encode_wav
from toolkit.errors import UserError

RATE = 8000


def load(dataset, folder=None, on_main=lambda decide: decide(), **settings):
    settings = {"features": LogMel(), "characters": Characters(), "tail_s": 0.25, "stride": 2} | settings
    return load_speech(dataset, folder, **settings, on_main=on_main)


def noise(seconds, seed=0, rate=RATE):
    return (0.1 * np.random.default_rng(seed).standard_normal(round(seconds * rate))).astype(np.float32)


def texts(data, split="train"):
    table = getattr(data, split)
    batch = table[torch.arange(len(table))]
    rows = zip(batch["target"].tolist(), batch["target_length"].tolist(), strict=True)
    return [Characters().decode(row[:n]) for row, n in rows]


def write(path, seconds=0.5, seed=0):
    rate = 16000 if path.suffix == ".flac" else RATE
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, noise(seconds, seed, rate), rate)


def write_fsdd(folder):
    """Write the layout of the Free Spoken Digit Dataset's repository: recordings 0 to 4 are test data."""
    for digit, speaker, index in [(7, "theo", 0), (7, "theo", 5), (3, "lucas", 12), (0, "lucas", 4), (1, "lucas", 49)]:
        write(folder / "recordings" / f"{digit}_{speaker}_{index}.wav", 0.3 + digit / 20, index)
    return folder


def write_fsdd_parquet(folder):
    (folder / "fsdd").mkdir(parents=True)
    for split, digits in {"train": [7, 3], "test": [0]}.items():
        audio = [{"bytes": encode_wav(noise(0.4, digit), RATE), "path": None} for digit in digits]
        columns = {"audio": audio, "digit": digits, "speaker": ["theo"] * len(digits), "index": [5] * len(digits)}
        pa.parquet.write_table(pa.table(columns), folder / "fsdd" / f"{split}-00000-of-00001.parquet")
    return folder


def write_librispeech(folder):
    for split, speaker, lines in [
        ("train-clean-100", "103", ["CHAPTER ONE", "IT'S"]),
        ("train-clean-360", "14", ["TWO"]),
        ("test-clean", "61", ["THREE"]),
    ]:
        chapter = folder / "LibriSpeech" / split / speaker / "1240"
        for number in range(len(lines)):
            write(chapter / f"{speaker}-1240-{number:04d}.flac", 0.6, number)
        transcript = [f"{speaker}-1240-{number:04d} {line}\n" for number, line in enumerate(lines)]
        (chapter / f"{speaker}-1240.trans.txt").write_text("".join(transcript))
    return folder


def write_gigaspeech(folder):
    def segment(begin, end, text, *subsets):
        marked = [f"{{{subset}}}" for subset in subsets]
        return {"begin_time": begin, "end_time": end, "text_tn": text, "subsets": marked, "speaker": "N/A"}

    podcast = [
        segment(0.0, 0.6, "AS YOU <COMMA> KNOW <PERIOD>", "XS", "S"),
        segment(0.6, 1.0, "<MUSIC>", "XS", "S"),
        segment(1.0, 1.6, "ONLY IN S", "S"),
    ]
    audios = [
        {"path": "audio/podcast/P0000/POD1.flac", "segments": podcast},
        {"path": "audio/youtube/P0001/YOU1.flac", "segments": [segment(0.5, 1.5, "A TEST <QUESTIONMARK>", "TEST")]},
    ]
    for audio in audios:
        write(folder / audio["path"], 2.0)
    (folder / "GigaSpeech.json").write_text(json.dumps({"audios": audios}))
    return folder


def write_manifest(folder, *train):
    write(folder / "a.wav")
    good = {"audio": "a.wav", "text": "Hello world", "speaker": 3}
    (folder / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (train or [good])))
    (folder / "test.jsonl").write_text(json.dumps(good) + "\n")
    return folder


def test_fsdd_is_read_with_published_split(tmp_path):
    data = load("fsdd", write_fsdd(tmp_path))
    assert (data.name, data.notice, data.num_digits(), data.num_mels) == ("fsdd", None, 8, 40)
    assert texts(data) == ["ONE", "THREE", "SEVEN"]
    assert texts(data, "test") == ["ZERO", "SEVEN"]
    letters = Characters()
    assert {letters.decode(word) for word in data.words(letters.space)} == {"ONE", "THREE", "SEVEN"}
    assert data.train.columns["label"].tolist() == [1, 3, 7]
    assert [data.speakers[i] for i in data.train.columns["speaker"]] == ["lucas", "lucas", "theo"]
    # 0.35, 0.45 and 0.65 s and a tail of 0.25 s; windows of 25 ms every 10 ms.
    assert data.train.columns["input_length"].tolist() == [58, 68, 88]
    torch.testing.assert_close(data.mean, data.train.ragged["input"].values.double().mean(0))


def test_fsdd_validation_is_part_of_training_split(tmp_path):
    for digit, speaker, index in itertools.product((1, 2), ("theo", "lucas"), (0, 4, *range(10, 17))):
        write(tmp_path / "recordings" / f"{digit}_{speaker}_{index}.wav", 0.3 + index / 100)
    data = load("fsdd:validation", tmp_path)
    assert data.name == "fsdd validation"
    # A frame per hundredth of a second identifies the recording; 0 and 4 are test data and are not read.
    assert sorted((data.test.columns["input_length"] - 53).tolist()) == sorted([10, 11, 12, 13, 14] * 4)
    assert sorted((data.train.columns["input_length"] - 53).tolist()) == sorted([15, 16] * 4)


def test_held_out_speaker_is_test_data(tmp_path):
    data = load("fsdd", write_fsdd(tmp_path), held_out_speaker="theo")
    assert (data.name, texts(data)) == ("fsdd without theo", ["ONE", "THREE", "ZERO"])
    assert texts(data, "test") == ["SEVEN", "SEVEN"]
    with pytest.raises(UserError, match="held_out_speaker='bob': take one of"):
        load("fsdd", tmp_path, held_out_speaker="bob")


def test_connected_digits_are_three_to_seven_of_one_speaker(tmp_path, monkeypatch):
    monkeypatch.setattr("speech.speech.CONNECTED", {"train": 40, "test": 10})
    data = load("connected_digits", write_fsdd(tmp_path))
    said = [text.split() for text in texts(data)]
    assert {len(words) for words in said} == {3, 4, 5, 6, 7}
    by_speaker = {"theo": {"SEVEN"}, "lucas": {"THREE", "ONE"}}
    for words, speaker in zip(said, data.train.columns["speaker"].tolist(), strict=True):
        assert set(words) <= by_speaker[data.speakers[speaker]]
    assert {word for text in texts(data, "test") for word in text.split()} == {"SEVEN", "ZERO"}
    with pytest.raises(UserError, match="target='digits': connected_digits is not made of single digits"):
        data.num_digits()


@pytest.mark.parametrize(
    ("write_set", "dataset", "name", "train", "test"),
    [
        (write_fsdd_parquet, "auto", "fsdd", ["SEVEN", "THREE"], ["ZERO"]),
        (write_librispeech, "librispeech", "librispeech", ["CHAPTER ONE", "IT'S", "TWO"], ["THREE"]),
        (write_gigaspeech, "gigaspeech", "gigaspeech-xs", ["AS YOU KNOW"], ["A TEST"]),
        (write_gigaspeech, "gigaspeech:s", "gigaspeech-s", ["AS YOU KNOW", "ONLY IN S"], ["A TEST"]),
        (write_manifest, "manifest", "manifest", ["HELLO WORLD"], ["HELLO WORLD"]),
    ],
)
def test_dataset_is_read_from_published_layout(tmp_path, write_set, dataset, name, train, test):
    data = load(dataset, write_set(tmp_path))
    assert (data.name, sorted(texts(data)), texts(data, "test")) == (name, train, test)
    assert dataset != "librispeech" or set(data.speakers) == {"103", "14", "61"}


def test_hub_rows_become_utterances(monkeypatch):
    with pytest.raises(UserError, match="dataset='librispeech': the Hub does not give openslr/librispeech_asr"):
        load("librispeech")
    audio = {"bytes": encode_wav(noise(0.5), RATE), "path": "a.wav"}
    stored = datasets.Dataset.from_dict({"audio": [audio], "text": ["HELLO <COMMA> YOU"], "speaker_id": [7]})
    requests = []

    def load_dataset(repo, config, *, split, streaming):
        requests.append((repo, config, split))
        assert streaming
        return stored.to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    data = load("librispeech:other")
    assert (texts(data), data.speakers) == (["HELLO YOU"], ("7",))
    assert requests == [("openslr/librispeech_asr", "other", split) for split in ("train.100", "test")]


def test_other_ranks_use_choice_and_cache_of_rank_0(tmp_path, cache, monkeypatch):
    chosen = []

    def on_rank_0(decide):
        chosen.append(decide())
        return chosen[0]

    folder = write_fsdd(tmp_path / "set")
    first = load("fsdd", folder, on_main=on_rank_0)
    folder.rename(tmp_path / "elsewhere")
    assert texts(load("fsdd", folder, on_main=lambda _: chosen[0])) == texts(first)
    monkeypatch.setenv("TOOLKIT_CACHE_DIR", str(cache / "another machine"))
    with pytest.raises(UserError, match="dataset='fsdd': "):
        load("fsdd", folder, on_main=lambda _: chosen[0])
    (tmp_path / "elsewhere").rename(folder)
    assert texts(load("fsdd", folder, on_main=lambda _: chosen[0])) == texts(first)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"audio": "b.wav", "text": "A"}, r"b\.wav: is not a file"),
        ({"audio": "a.wav", "text": None}, r"line 1 is not right \(its text is no string\)"),
        ({"audio": "../a.wav", "text": "A"}, "is outside the folder of the data set"),
        ({"audio": "pipe.wav", "text": "A"}, r"pipe\.wav: is not a file"),
    ],
)
def test_invalid_manifest_raises(tmp_path, line, message):
    os.mkfifo(write_manifest(tmp_path, line) / "pipe.wav")
    with pytest.raises(UserError, match=message):
        load("manifest", tmp_path)


def test_unusable_utterances_are_dropped_with_notice(tmp_path):
    lines = [{"audio": "a.wav", "text": text} for text in ("fine", "4 digits", "x" * 300, " ")]
    data = load("manifest", write_manifest(tmp_path, *lines))
    assert texts(data) == ["FINE"]
    assert data.notice == "3 of 5 utterances were left out: text empty, not in the vocabulary, or too long."


def test_own_recordings_with_table_of_texts(tmp_path):
    for split, count in {"train": 3, "test": 1, "validation": 1}.items():
        lines = ["file_name,text"]
        for number in range(count):
            write(tmp_path / split / f"{number}.wav", 0.6, number)
            lines.append(f"{number}.wav,{split} one")
        (tmp_path / split / "metadata.csv").write_text("\n".join(lines))
    data = load(str(tmp_path), validation=True)
    assert [len(table) for table in (data.train, data.test, data.validation)] == [3, 1, 1]
    assert (texts(data), texts(data, "validation")) == (["TRAIN ONE"] * 3, ["VALIDATION ONE"])
    (tmp_path / "validation" / "metadata.csv").write_text("file,text\n0.wav,one")
    with pytest.raises(UserError, match=r"metadata\.csv has no column file_name: name the recording of each row"):
        load(str(tmp_path))


def test_own_recordings_in_folder_per_word(tmp_path):
    for word, number in itertools.product(("no", "yes"), range(10)):
        write(tmp_path / "words" / word / f"{number}.wav", seed=number)
    data = load(str(tmp_path / "words"), validation=True)
    assert (data.num_digits(), sorted(set(texts(data)))) == (2, ["NO", "YES"])
    assert [len(table) for table in (data.train, data.test, data.validation)] == [17, 2, 1]
    assert data.notice == "words: it has no test split: 2 of 20 rows, drawn with seed 0, are held out."


def test_without_dataset_tones_are_used_with_notice():
    data = load("auto")
    assert (data.name, len(data.train), len(data.test)) == ("tones", 480, 120)
    assert data.notice == "No spoken digits (dataset='fsdd' says why): training on synthetic tones."
    assert load("tones").notice.startswith("Synthetic tones")


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ("fsdd", ".* holds neither fsdd/train"),
        ("auto", ".* holds neither"),
        ("librispeech", ".* holds no LibriSpeech/train"),
        ("gigaspeech", ".* holds no GigaSpeech.json"),
        ("manifest", ".* holds no train.jsonl"),
        ("speech", "there is no such set"),
    ],
)
def test_missing_dataset_raises(dataset, message, tmp_path):
    with pytest.raises(UserError, match=f"dataset='{dataset}': {message}"):
        load(dataset, tmp_path)


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("digit", 10, "digit 10 in row 1"),
        ("digit", None, "digit None in row 1"),
        ("speaker", None, "has a null in row 1"),
        ("audio", {"bytes": None, "path": None}, "has a null in row 1"),
        ("audio", {"bytes": b"RIFF", "path": None}, "row 1 of .* cannot be read as sound"),
    ],
)
def test_invalid_parquet_rows_raise(column, value, message, tmp_path):
    path = write_fsdd_parquet(tmp_path) / "fsdd" / "train-00000-of-00001.parquet"
    table = pa.parquet.read_table(path)
    changed = pa.array([table[column].to_pylist()[0], value], table[column].type)
    pa.parquet.write_table(table.set_column(table.column_names.index(column), column, changed), path)
    with pytest.raises(UserError, match=message) as error:
        load("fsdd", tmp_path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [("7_theo_5", "has a sample that is not finite"), ("x_theo_5", "is not named <digit>_<speaker>_<number>")],
)
def test_invalid_recordings_raise(name, message, tmp_path):
    samples = noise(0.3)
    samples[100] = np.nan
    path = write_fsdd(tmp_path) / "recordings" / f"{name}.wav"
    soundfile.write(path, samples, RATE, subtype="FLOAT")
    with pytest.raises(UserError, match=f"{path} {message}"):
        load("fsdd", tmp_path)
