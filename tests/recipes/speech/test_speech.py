"""Sets of speech in the layouts that they are published in, small ones that are written here."""

import io
import itertools
import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch

from speech.audio import LogMel
from speech.characters import Characters
from speech.speech import SpeechData, load_speech
from tests.recipes.speech.sounds import encode_wav
from toolkit.errors import UserError

RATE = 8000


def load(dataset: str, folder: Path | None = None, **settings) -> SpeechData:
    settings = {"features": LogMel(), "characters": Characters(), "tail_s": 0.25, "stride": 2} | settings
    return load_speech(dataset, folder, **settings, on_main=lambda decide: decide())


def noise(seconds: float, seed: int = 0, rate: int = RATE) -> np.ndarray:
    return (0.1 * np.random.default_rng(seed).standard_normal(round(seconds * rate))).astype(np.float32)


def texts(data: SpeechData, split: str = "train") -> list[str]:
    table = getattr(data, split)
    batch = table[torch.arange(len(table))]
    rows = zip(batch["target"].tolist(), batch["target_length"].tolist(), strict=True)
    return [Characters().decode(row[:n]) for row, n in rows]


def write_recordings(folder: Path) -> Path:
    """The layout of the Free Spoken Digit Dataset's repository: recordings 0 to 4 are for testing."""
    (folder / "recordings").mkdir(parents=True)
    for digit, speaker, index in [(7, "theo", 0), (7, "theo", 5), (3, "lucas", 12), (0, "lucas", 4), (1, "lucas", 49)]:
        path = folder / "recordings" / f"{digit}_{speaker}_{index}.wav"
        path.write_bytes(encode_wav(noise(0.3 + digit / 20, index), RATE))
    return folder


def write_digits_as_parquet(folder: Path) -> Path:
    (folder / "fsdd").mkdir(parents=True)
    for split, digits in {"train": [7, 3], "test": [0]}.items():
        audio = [{"bytes": encode_wav(noise(0.4, digit), RATE), "path": None} for digit in digits]
        columns = {"audio": audio, "digit": digits, "speaker": ["theo"] * len(digits), "index": [5] * len(digits)}
        pa.parquet.write_table(pa.table(columns), folder / "fsdd" / f"{split}-00000-of-00001.parquet")
    return folder


def flac(samples: np.ndarray, rate: int) -> bytes:
    import soundfile

    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format="FLAC")
    return buffer.getvalue()


def write_librispeech(folder: Path) -> Path:
    for split, speaker, lines in [
        ("train-clean-100", "103", ["CHAPTER ONE", "IT'S"]),
        ("train-clean-360", "14", ["TWO"]),
        ("test-clean", "61", ["THREE"]),
    ]:
        chapter = folder / "LibriSpeech" / split / speaker / "1240"
        chapter.mkdir(parents=True)
        names = [f"{speaker}-1240-{number:04d}" for number in range(len(lines))]
        transcript = "".join(f"{name} {line}\n" for name, line in zip(names, lines, strict=True))
        (chapter / f"{speaker}-1240.trans.txt").write_text(transcript)
        for number, name in enumerate(names):
            (chapter / f"{name}.flac").write_bytes(flac(noise(0.6, number, rate=16000), 16000))
    return folder


def write_gigaspeech(folder: Path) -> Path:
    def segment(begin: float, end: float, text: str, *subsets: str) -> dict:
        marked = [f"{{{subset}}}" for subset in subsets]
        return {"begin_time": begin, "end_time": end, "text_tn": text, "subsets": marked, "speaker": "N/A"}

    audios = [
        {
            "path": "audio/podcast/P0000/POD1.flac",
            "segments": [
                segment(0.0, 0.6, "AS YOU <COMMA> KNOW <PERIOD>", "XS", "S"),
                segment(0.6, 1.0, "<MUSIC>", "XS", "S"),
                segment(1.0, 1.6, "ONLY IN S", "S"),
            ],
        },
        {"path": "audio/youtube/P0001/YOU1.flac", "segments": [segment(0.5, 1.5, "A TEST <QUESTIONMARK>", "TEST")]},
    ]
    for audio in audios:
        path = folder / audio["path"]
        path.parent.mkdir(parents=True)
        path.write_bytes(flac(noise(2.0, rate=16000), 16000))
    (folder / "GigaSpeech.json").write_text(json.dumps({"audios": audios}))
    return folder


def write_manifest(folder: Path, *train: dict) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "a.wav").write_bytes(encode_wav(noise(0.5), RATE))
    good = {"audio": "a.wav", "text": "Hello world", "speaker": 3}
    (folder / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (train or [good])))
    (folder / "test.jsonl").write_text(json.dumps(good) + "\n")
    return folder


def test_digits_are_read_from_the_authors_folder_with_the_authors_split(tmp_path):
    data = load("fsdd", write_recordings(tmp_path))
    assert (data.name, data.notice, data.num_digits()) == ("fsdd", None, 8)
    assert texts(data) == ["ONE", "THREE", "SEVEN"]
    assert texts(data, "test") == ["ZERO", "SEVEN"]
    letters = Characters()
    assert {letters.decode(word) for word in data.words(letters.space)} == {"ONE", "THREE", "SEVEN"}
    assert data.train.columns["label"].tolist() == [1, 3, 7]
    assert [data.speakers[i] for i in data.train.columns["speaker"]] == ["lucas", "lucas", "theo"]


def test_choices_are_tested_on_a_part_of_the_training_split(tmp_path):
    recordings = tmp_path / "recordings"
    recordings.mkdir()
    for digit, speaker, index in itertools.product((1, 2), ("theo", "lucas"), (0, 4, *range(10, 17))):
        (recordings / f"{digit}_{speaker}_{index}.wav").write_bytes(encode_wav(noise(0.3 + index / 100), RATE))
    data = load("fsdd:validation", tmp_path)
    assert data.name == "fsdd validation"
    # A frame per hundredth of a second tells which recording it is; 0 and 4 are for testing, and are not read.
    assert sorted((data.test.columns["input_length"] - 53).tolist()) == sorted([10, 11, 12, 13, 14] * 4)
    assert sorted((data.train.columns["input_length"] - 53).tolist()) == sorted([15, 16] * 4)


def test_frames_are_as_many_as_sound_and_tail_have(tmp_path):
    data = load("fsdd", write_recordings(tmp_path), tail_s=0.1)
    # 0.35, 0.45 and 0.65 s and 0.1 s of silence; windows of 25 ms every 10 ms.
    assert data.train.columns["input_length"].tolist() == [43, 53, 73]
    every = data.train.ragged["input"].values.double()
    torch.testing.assert_close(data.mean, every.mean(0))
    assert data.num_mels == 40


def test_digits_are_read_from_parquet(tmp_path):
    data = load("auto", write_digits_as_parquet(tmp_path))
    assert (data.name, texts(data), texts(data, "test")) == ("fsdd", ["SEVEN", "THREE"], ["ZERO"])


def test_other_processes_map_what_the_main_one_chose_and_choose_only_without_it(tmp_path, cache, monkeypatch):
    chosen = []

    def on_main(decide):
        chosen.append(decide())
        return chosen[0]

    folder = write_recordings(tmp_path / "set")
    settings = {"features": LogMel(), "characters": Characters(), "tail_s": 0.25, "stride": 2}
    first = load_speech("fsdd", folder, **settings, on_main=on_main)
    folder.rename(tmp_path / "elsewhere")
    other = load_speech("fsdd", folder, **settings, on_main=lambda _: chosen[0])
    assert texts(other) == texts(first)
    monkeypatch.setenv("TOOLKIT_CACHE_DIR", str(cache / "another machine"))
    with pytest.raises(UserError, match="dataset='fsdd': "):
        load_speech("fsdd", folder, **settings, on_main=lambda _: chosen[0])
    (tmp_path / "elsewhere").rename(folder)
    assert texts(load_speech("fsdd", folder, **settings, on_main=lambda _: chosen[0])) == texts(first)


def test_connected_digits_are_three_to_seven_of_one_speaker_and_of_its_own_split(tmp_path, monkeypatch):
    monkeypatch.setattr("speech.speech.CONNECTED", {"train": 40, "test": 10})
    data = load("connected_digits", write_recordings(tmp_path))
    said = [text.split() for text in texts(data)]
    assert {len(words) for words in said} == {3, 4, 5, 6, 7}
    by_speaker = {"theo": {"SEVEN"}, "lucas": {"THREE", "ONE"}}
    for words, speaker in zip(said, data.train.columns["speaker"].tolist(), strict=True):
        assert set(words) <= by_speaker[data.speakers[speaker]]
    assert {word for text in texts(data, "test") for word in text.split()} == {"SEVEN", "ZERO"}
    with pytest.raises(UserError, match="target='digits': connected_digits is not made of single digits"):
        data.num_digits()


def test_librispeech_is_read_from_the_publishers_folder(tmp_path):
    data = load("librispeech", write_librispeech(tmp_path), features=LogMel(sample_rate=16000, num_mels=80))
    assert sorted(texts(data)) == ["CHAPTER ONE", "IT'S", "TWO"]
    assert texts(data, "test") == ["THREE"]
    assert set(data.speakers) == {"103", "14", "61"}


def test_gigaspeech_is_read_from_the_publishers_folder_one_subset_without_tags(tmp_path):
    data = load("gigaspeech", write_gigaspeech(tmp_path))
    assert (data.name, texts(data), texts(data, "test")) == ("gigaspeech-xs", ["AS YOU KNOW"], ["A TEST"])
    assert texts(load("gigaspeech:s", tmp_path)) == ["AS YOU KNOW", "ONLY IN S"]


def test_a_manifest_is_read_and_its_faults_are_named(tmp_path):
    assert texts(load("manifest", write_manifest(tmp_path))) == ["HELLO WORLD"]
    write_manifest(tmp_path / "other", {"audio": "b.wav", "text": "A"})
    with pytest.raises(UserError, match=r"b\.wav: is not a file"):
        load("manifest", tmp_path / "other")
    write_manifest(tmp_path / "null", {"audio": "a.wav", "text": None})
    with pytest.raises(UserError, match=r"line 1 is not right \(its text is no string\)"):
        load("manifest", tmp_path / "null")
    write_manifest(tmp_path / "outside", {"audio": "../a.wav", "text": "A"})
    with pytest.raises(UserError, match="is outside the folder of the data set"):
        load("manifest", tmp_path / "outside")
    write_manifest(tmp_path / "pipe", {"audio": "p.wav", "text": "A"})
    os.mkfifo(tmp_path / "pipe" / "p.wav")
    with pytest.raises(UserError, match=r"p\.wav: is not a file"):
        load("manifest", tmp_path / "pipe")


def test_utterances_that_do_not_fit_are_left_out_and_counted(tmp_path):
    write_manifest(
        tmp_path,
        {"audio": "a.wav", "text": "fine"},
        {"audio": "a.wav", "text": "4 digits"},
        {"audio": "a.wav", "text": "x" * 300},
        {"audio": "a.wav", "text": " "},
    )
    data = load("manifest", tmp_path)
    assert texts(data) == ["FINE"]
    assert data.notice == "3 of 5 utterances were left out: text empty, not in the vocabulary, or too long."


def test_recordings_of_ones_own_have_text_in_a_table_or_a_folder_for_each_word(tmp_path):
    for split, count in {"train": 3, "test": 1, "validation": 1}.items():
        folder = tmp_path / "said" / split
        folder.mkdir(parents=True)
        lines = ["file_name,text"]
        for number in range(count):
            (folder / f"{number}.wav").write_bytes(encode_wav(noise(0.6, number), RATE))
            lines.append(f"{number}.wav,{split} one")
        (folder / "metadata.csv").write_text("\n".join(lines))
    data = load(str(tmp_path / "said"), validation=True)
    assert [len(table) for table in (data.train, data.test, data.validation)] == [3, 1, 1]
    assert (texts(data), texts(data, "validation")) == (["TRAIN ONE"] * 3, ["VALIDATION ONE"])
    for word, number in itertools.product(("no", "yes"), range(10)):
        path = tmp_path / "words" / word / f"{number}.wav"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode_wav(noise(0.5, number), RATE))
    data = load(str(tmp_path / "words"), validation=True)
    assert (data.num_digits(), sorted(set(texts(data)))) == (2, ["NO", "YES"])
    assert [len(table) for table in (data.train, data.test, data.validation)] == [17, 2, 1]
    assert data.notice == "words: it has no test split: 2 of 20 rows, drawn with seed 0, are held out."
    (folder / "metadata.csv").write_text("file,text\n0.wav,one")
    with pytest.raises(UserError, match=r"metadata\.csv has no column file_name: name the recording of each row"):
        load(str(tmp_path / "said"))


def test_a_speaker_can_be_held_out_with_all_recordings(tmp_path):
    data = load("fsdd", write_recordings(tmp_path), held_out_speaker="theo")
    assert (data.name, texts(data), texts(data, "test")) == (
        "fsdd without theo",
        ["ONE", "THREE", "ZERO"],
        ["SEVEN", "SEVEN"],
    )
    with pytest.raises(UserError, match="held_out_speaker='bob': take one of"):
        load("fsdd", tmp_path, held_out_speaker="bob")


def test_without_speech_there_are_tones_that_are_named_as_such():
    data = load("auto")
    assert data.name == "tones"
    assert data.notice == "No spoken digits (dataset='fsdd' says why): training on synthetic tones."
    assert len(data.train) == 480
    assert len(data.test) == 120
    assert load("tones").notice.startswith("Synthetic tones")


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ("fsdd", "dataset='fsdd': .* holds neither fsdd/train"),
        ("auto", "dataset='auto': .* holds neither"),
        ("librispeech", "dataset='librispeech': .* holds no LibriSpeech/train"),
        ("gigaspeech", "dataset='gigaspeech': .* holds no GigaSpeech.json"),
        ("manifest", "dataset='manifest': .* holds no train.jsonl"),
        ("speech", "dataset='speech': there is no such set"),
    ],
)
def test_a_set_that_is_not_there_ends_in_one_sentence(dataset, message, tmp_path):
    with pytest.raises(UserError, match=message):
        load(dataset, tmp_path)


NOT_DIGITS = {
    "digit": [(10, "digit 10 in row 1"), (None, "digit None in row 1")],
    "speaker": [(None, "has a null in row 1")],
    "audio": [
        ({"bytes": None, "path": None}, "has a null in row 1"),
        ({"bytes": b"RIFF", "path": None}, "row 1 of .* cannot be read as sound"),
    ],
}


@pytest.mark.parametrize(("column", "value", "message"), [(c, v, m) for c, vs in NOT_DIGITS.items() for v, m in vs])
def test_rows_that_cannot_be_are_refused(column, value, message, tmp_path):
    path = write_digits_as_parquet(tmp_path) / "fsdd" / "train-00000-of-00001.parquet"
    table = pa.parquet.read_table(path)
    changed = pa.array([table[column].to_pylist()[0], value], table[column].type)
    pa.parquet.write_table(table.set_column(table.column_names.index(column), column, changed), path)
    with pytest.raises(UserError, match=message) as told:
        load("fsdd", tmp_path)
    assert str(path) in str(told.value)


def test_a_sample_that_is_not_finite_is_refused(tmp_path):
    import soundfile

    samples = noise(0.3)
    samples[100] = np.nan
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, RATE, format="WAV", subtype="FLOAT")
    path = write_recordings(tmp_path) / "recordings" / "7_theo_5.wav"
    path.write_bytes(buffer.getvalue())
    with pytest.raises(UserError, match=f"{path} has a sample that is not finite"):
        load("fsdd", tmp_path)


def test_a_recording_of_another_name_is_refused(tmp_path):
    path = write_recordings(tmp_path) / "recordings" / "x_theo_5.wav"
    path.write_bytes(encode_wav(noise(0.3), RATE))
    with pytest.raises(UserError, match=f"{path} is not named <digit>_<speaker>_<number>"):
        load("fsdd", tmp_path)


def test_the_hub_is_asked_with_datasets_and_says_what_to_do():
    with pytest.raises(UserError, match="dataset='librispeech': the Hub does not give openslr/librispeech_asr"):
        load("librispeech")


def test_rows_of_the_hub_become_utterances(monkeypatch):
    import datasets

    rows = {
        "audio": [{"bytes": encode_wav(noise(0.5), RATE), "path": "a.wav"}],
        "text": ["HELLO <COMMA> YOU"],
        "speaker_id": [7],
    }
    stored = datasets.Dataset.from_dict(rows)
    asked = []

    def give(repo: str, config: str, *, split: str, streaming: bool) -> datasets.IterableDataset:
        asked.append((repo, config, split))
        assert streaming
        return stored.to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", give)
    data = load("librispeech:other")
    assert (texts(data), data.speakers) == (["HELLO YOU"], ("7",))
    assert asked == [("openslr/librispeech_asr", "other", split) for split in ("train.100", "test")]
