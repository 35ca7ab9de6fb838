"""Recordings of people: found, read, cut into windows, and no volunteer on both sides of a split."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch

from activity.activity import ActivityData, load_activity
from activity.activity_sources import UCI_HAR_REPO, Trial, cut, generate_trials
from tests.data.layouts import REVISION
from tests.recipes.activity.layouts import UCI_LABELS, codes, uci_signal, write_hmp, write_uci_har
from toolkit.errors import UserError

VOLUNTEERS = ("f1", "f2", "m1", "m2", "m3")


def load(dataset: str = "auto", data_dir: Path | None = None, **choices: Any) -> ActivityData:
    return load_activity(dataset, data_dir, on_main=lambda decide: decide(), **choices)


def refusal(dataset: str, data_dir: Path | None = None, **choices: Any) -> str:
    """The one sentence that loading is refused with."""
    with pytest.raises(UserError) as caught:
        load(dataset, data_dir, **choices)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def hmp(folder: Path) -> Path:
    """Five volunteers with other numbers of windows each, two activities."""
    trials = [
        (activity, volunteer, codes(128 + 64 * i, start=10 * i))
        for i, volunteer in enumerate(VOLUNTEERS)
        for activity in ("walk", "drink_glass")
    ]
    return write_hmp(folder / "hmp", trials).parent


# --- UCI-HAR


@pytest.mark.parametrize("place", ["UCI HAR Dataset", "uci_har", "."])
def test_the_publishers_folder_is_read_with_its_own_split_of_subjects(tmp_path, place):
    write_uci_har(tmp_path / place)
    data = load("uci_har", tmp_path)
    for table, split in ((data.train, "train"), (data.test, "test")):
        assert np.array_equal(table.columns["input"].numpy(), uci_signal(split))
        assert table.columns["label"].tolist() == [label - 1 for label in UCI_LABELS[split]]
    assert (data.name, data.held_out, data.rate_hz, data.num_channels) == ("uci_har", ("2", "4"), 50.0, 9)
    assert data.classes[3:5] == ("sitting", "standing")
    assert data.class_counts.tolist() == [1] * 6
    assert "windows of 2.56 s" in data.describe()


def test_it_is_found_in_the_cache_of_the_hub(cache):
    store = cache / "hub" / f"datasets--{UCI_HAR_REPO.replace('/', '--')}"
    (store / "refs").mkdir(parents=True)
    (store / "refs" / "main").write_text(REVISION)
    write_uci_har(store / "snapshots" / REVISION)
    assert len(load("auto").test) == 3


def test_its_subjects_may_be_divided_into_folds_instead(tmp_path):
    write_uci_har(tmp_path)
    data = load("uci_har", tmp_path, fold=0, folds=5)
    assert data.held_out == ("3",), "who has most windows comes first"
    assert (len(data.train), len(data.test)) == (6, 3)


ROW = "1 " * 128 + "\n"


@pytest.mark.parametrize(
    ("path", "text", "message"),
    [
        ("train/y_train.txt", "1\n2\n3\n4\n5\n7\n", "y_train.txt holds the label 7 in row 5, which is not from 1 to 6"),
        ("train/y_train.txt", "1\n", "has 6 rows for 1 labels"),
        ("test/subject_test.txt", "one\n", "subject_test.txt cannot be read as rows of numbers"),
        ("test/Inertial Signals/body_acc_x_test.txt", "1 2 3\n" * 3, "has 3 numbers in a row"),
        ("test/Inertial Signals/body_acc_x_test.txt", ROW * 2 + "inf " * 128, "a number that is not finite in row 2"),
        ("test/y_test.txt", "", "y_test.txt has no rows"),
        ("test/Inertial Signals/body_acc_x_test.txt", None, "has no test/Inertial Signals/body_acc_x_test.txt"),
    ],
)
def test_files_that_are_not_what_they_claim_are_refused(tmp_path, path, text, message):
    write_uci_har(tmp_path)
    if text is None:
        (tmp_path / path).unlink()
    else:
        (tmp_path / path).write_text(text)
    assert message in refusal("uci_har", tmp_path)


# --- the wrist accelerometer


def test_codes_become_g_and_windows_overlap_within_a_trial(tmp_path):
    write_hmp(tmp_path / "hmp", [("walk", "f1", codes(300)), ("rest", "m1", codes(10, start=5))])
    data = load("hmp", tmp_path, folds=2)
    windows, labels = data.test.columns["input"], data.test.columns["label"]
    g = torch.from_numpy(codes(300)) * (3.0 / 63) - 1.5
    # f1 has most windows and is fold 0: 300 readings hold windows at 0, 64 and 128; the next would end at 320.
    expected = torch.stack([g[:, start : start + 128] for start in (0, 64, 128)]).float()
    torch.testing.assert_close(windows, expected)
    assert [data.classes[label] for label in labels.tolist()] == ["walk"] * 3
    short = data.train.columns["input"][0]
    assert torch.equal(short[:, 9:], short[:, 9:10].expand(3, 119)), "a short trial repeats its last reading"
    assert data.class_counts.tolist() == [1, 0]


@pytest.mark.parametrize(("seconds", "overlap", "count"), [(4.0, 0.0, 2), (2.0, 0.5, 8), (4.0, 0.75, 6)])
def test_windows_are_as_long_and_as_dense_as_was_said(tmp_path, seconds, overlap, count):
    write_hmp(tmp_path / "hmp", [("walk", "f1", codes(300)), ("walk", "m1", codes(300))])
    data = load("hmp", tmp_path, folds=2, window_seconds=seconds, overlap=overlap)
    assert data.test.columns["input"].shape == (count, 3, round(32 * seconds))


def test_no_window_spans_two_trials():
    trials = [Trial(np.full((3, 150 + i), float(i), np.float32), "walk", "f1") for i in range(4)]
    windows = cut(trials, steps=128, overlap=0.9)
    assert (windows.signal == windows.signal[:, :1, :1]).all()
    assert sorted(set(windows.signal[:, 0, 0].tolist())) == [0, 1, 2, 3]


def test_every_volunteer_is_held_out_in_one_fold_and_absent_from_its_training(tmp_path):
    hmp(tmp_path)
    folds = [load("hmp", tmp_path, fold=fold, folds=3) for fold in range(3)]
    assert sorted(name for data in folds for name in data.held_out) == sorted(VOLUNTEERS)
    # A volunteer's first window begins with a code of its own.
    for data in folds:
        seen = {float(value) for value in data.train.columns["input"][:, 0, 0]}
        assert not seen & {float(value) for value in data.test.columns["input"][:, 0, 0]}
        assert len(data.train) + len(data.test) == 2 * (1 + 2 + 3 + 4 + 5)


def test_validation_volunteers_are_neither_trained_nor_tested_on(tmp_path):
    data = load("hmp", hmp(tmp_path), fold=1, folds=3, validation=True)
    plain = load("hmp", tmp_path, fold=1, folds=3)
    tables = (data.train, data.validation, data.test)
    # A volunteer's windows begin with codes of their own.
    begins = [{float(value) for value in table.columns["input"][:, 0, 0]} for table in tables]
    assert len(begins[0] | begins[1] | begins[2]) == sum(map(len, begins))
    assert len(data.train) + len(data.validation) == len(plain.train)
    assert data.held_out == plain.held_out


def write_trials(path: Path, **changes: Any) -> Path:
    """Four subjects, two activities, 40 readings of each of two signals, a row per reading."""
    rows = [(name, done, t / 20, t + 100 * i, -t) for i, name in enumerate("abcd") for done in "xy" for t in range(40)]
    frame = pandas.DataFrame(rows, columns=["subject", "activity", "time", "left", "right"]).assign(**changes)
    frame.to_csv(path) if path.suffix == ".csv" else frame.to_parquet(path)
    return path


def test_trials_of_ones_own_are_cut_by_their_rate_and_subjects_are_held_out(tmp_path):
    path = write_trials(tmp_path / "trials.csv", index=0)
    data = load(str(path), rate_hz=20.0, window_seconds=1.0, overlap=0.0, folds=4)
    assert (data.classes, data.num_channels, data.rate_hz) == (("x", "y"), 2, 20.0)
    assert (len(data.train), len(data.test), len(data.held_out)) == (12, 4, 1)
    assert data.notice == "trials.csv has the signals left, right at 20 Hz."
    first = data.test.columns["input"][0]
    assert torch.equal(first[0] - first[0, 0], torch.arange(20.0)), "no window spans two trials"
    assert "rate_hz=None: say how many readings per second" in refusal(str(path))


def test_trials_in_lists_with_a_test_split_hold_out_its_subjects(tmp_path):
    for split, subjects in {"train": "abc", "test": "d"}.items():
        rows = [{"user": name, "label": "sit", "x": [1.5] * 16, "y": [2.5] * 16} for name in subjects]
        pandas.DataFrame(rows).to_parquet(tmp_path / f"{split}.parquet")
    data = load(str(tmp_path), rate_hz=8.0, window_seconds=2.0)
    assert (data.held_out, len(data.train), len(data.test)) == (("d",), 3, 1)
    assert data.test.columns["input"][0].tolist() == [[1.5] * 16, [2.5] * 16]


@pytest.mark.parametrize(
    "splits", [{"train": "ab", "validation": "c", "test": "d"}, {"train": "abc", "validation": "d"}]
)
def test_the_subjects_of_a_split_for_validation_are_not_trained_on(splits, tmp_path):
    for split, names in splits.items():
        rows = [{"user": name, "label": "sit", "x": [float(ord(name))] * 16} for name in names]
        pandas.DataFrame(rows).to_parquet(tmp_path / f"{split}.parquet")

    def subjects(**settings: Any) -> list[str]:
        data = load(str(tmp_path), rate_hz=8.0, window_seconds=2.0, **settings)
        tables = [table for table in (data.train, data.validation, data.test) if table is not None]
        return ["".join(chr(int(value)) for value in table.columns["input"][:, 0, 0].sort().values) for table in tables]

    assert subjects() == [splits["train"], "d"]
    assert "".join(subjects(validation=True)) in ("abcd", "bcad", "acbd")
    assert subjects(validation=True)[-1] == "d"
    assert "test" not in splits or subjects(validation=True)[1] == "c"


def test_a_reading_that_is_missing_is_named_by_its_row(tmp_path):
    path = write_trials(tmp_path / "trials.parquet", left=[None, *range(319)])
    assert "row 0 of the train split lacks a value" in refusal(str(path), rate_hz=20.0)
    path = write_trials(tmp_path / "text.csv", left=lambda table: ["broken", *table["left"][1:]])
    assert "row 0 of left is no number: 'broken'" in refusal(str(path), rate_hz=20.0)
    path = write_trials(tmp_path / "trials.parquet", subject=0.5, left="a", right="b")
    assert "is a signal, a number" in refusal(str(path), rate_hz=20.0)


def test_the_environment_names_a_folder_of_sets(tmp_path, monkeypatch):
    monkeypatch.setenv("TOOLKIT_DATA_DIR", str(hmp(tmp_path)))
    assert load("auto").name == "hmp"
    write_uci_har(tmp_path / "uci_har")
    assert load("auto").name == "hmp"
    assert load("uci_har").name == "uci_har"


@pytest.mark.parametrize(
    ("trial", "message"),
    [
        (("walk", "f1", codes(200) + 1), "has a reading that is not an integer from 0 to 63 in row 0"),
        (("walk", "f1", np.where(codes(200) == 3, None, codes(200))), "has a reading that is not an integer"),
        (("walk", None, codes(200)), "has a null in row 0"),
        (("walk", "f1", np.zeros((3, 0), int)), "has axes of [0] readings in row 0"),
    ],
)
def test_readings_that_cannot_be_are_refused(tmp_path, trial, message):
    write_hmp(tmp_path / "hmp", [trial])
    assert message in refusal("hmp", tmp_path)


# --- generated signals, and choices that cannot be


def test_where_there_is_no_set_made_up_signals_are_taken_and_said_to_be_so():
    data = load("auto")
    assert data.name == "generated"
    assert data.notice == "No hmp (dataset='hmp' says why): made-up volunteers say nothing about people."
    assert load("generated").notice == "Made-up volunteers say nothing about people."
    assert all(name.startswith("made-up") for name in data.held_out)
    again = generate_trials()
    assert all(np.array_equal(a.signal, b.signal) for a, b in zip(generate_trials(), again, strict=True))


def test_what_cannot_be_is_refused_in_one_sentence(tmp_path):
    assert "dataset='mnist': there is no such set; choose one of auto, hmp, uci_har, generated" in refusal("mnist")
    assert "does not hold hmp/train-*.parquet; name the folder of the set" in refusal("hmp", tmp_path)
    assert "there is no data_dir and no $TOOLKIT_DATA_DIR; give data_dir, or take generated" in refusal("hmp")
    assert "folds=11: take at most 10, the number of volunteers" in refusal("generated", folds=11)
    write_uci_har(tmp_path / "uci_har")
    assert "published in windows of 2.56 s" in refusal("uci_har", tmp_path, window_seconds=4.0)
    shutil.rmtree(tmp_path / "uci_har" / "test")
    assert "has no test/y_test.txt" in refusal("uci_har", tmp_path)
