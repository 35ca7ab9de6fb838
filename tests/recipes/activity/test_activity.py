"""Datasets of activity recordings: sources, windows, splits by volunteer."""

import shutil

import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch

from activity.activity import load_activity
from activity.activity_sources import UCI_HAR_REPO, UCI_HAR_SIGNALS, generate_trials
from tests.data.layouts import REVISION
from toolkit.errors import UserError

UCI_SUBJECTS = {"train": [1, 1, 3, 3, 3, 6], "test": [2, 2, 4]}
UCI_LABELS = {"train": [1, 2, 3, 4, 5, 6], "test": [6, 1, 2]}


def uci_signal(split):
    """Return signals (windows, 9, 128) that the text files of `split` represent exactly."""
    shape = (len(UCI_LABELS[split]), len(UCI_HAR_SIGNALS), 128)
    return np.random.default_rng(len(split)).integers(-1000, 1000, shape).astype(np.float32) / 16


def write_uci_har(folder):
    """Write both splits: a text file per signal, a row per window."""
    for split in UCI_LABELS:
        signals = folder / split / "Inertial Signals"
        signals.mkdir(parents=True)
        for channel, name in enumerate(UCI_HAR_SIGNALS):
            np.savetxt(signals / f"{name}_{split}.txt", uci_signal(split)[:, channel], fmt=" %.7e")
        (folder / split / f"y_{split}.txt").write_text("".join(f"{label}\n" for label in UCI_LABELS[split]))
        (folder / split / f"subject_{split}.txt").write_text("".join(f"{s}\n" for s in UCI_SUBJECTS[split]))


def write_hmp(folder, trials):
    """Write trials of (activity, volunteer, codes (3, readings)) as rows of a Parquet file in `folder`/hmp."""
    (folder / "hmp").mkdir(exist_ok=True)
    columns = {
        "activity": [activity for activity, _, _ in trials],
        "volunteer": [volunteer for _, volunteer, _ in trials],
        "recorded_at": ["2011-04-11-13-28-18"] * len(trials),
        **{axis: [codes[i].tolist() for _, _, codes in trials] for i, axis in enumerate("xyz")},
    }
    pa.parquet.write_table(pa.table(columns), folder / "hmp" / "train-00000-of-00001.parquet")


def codes(readings, start=0):
    """Return codes (3, readings) from 0 to 63 that count up, at a different rate on each axis."""
    return (np.arange(readings) * np.array([[1], [2], [3]]) + start) % 64


VOLUNTEERS = ("f1", "f2", "m1", "m2", "m3")


def load(dataset="auto", data_dir=None, **settings):
    return load_activity(dataset, data_dir, on_main=lambda decide: decide(), **settings)


def error_of(dataset, data_dir=None, **settings):
    with pytest.raises(UserError) as error:
        load(dataset, data_dir, **settings)
    assert "\n" not in str(error.value)
    return str(error.value)


def write_volunteers(folder):
    """Write five volunteers with different numbers of windows, each with two activities."""
    trials = [
        (activity, volunteer, codes(128 + 64 * i, start=10 * i))
        for i, volunteer in enumerate(VOLUNTEERS)
        for activity in ("walk", "drink_glass")
    ]
    write_hmp(folder, trials)


def first_codes(table):
    """Return the codes that the windows of a table begin with, which identify their volunteers."""
    return set(table.columns["input"][:, 0, 0].tolist())


@pytest.mark.parametrize("place", ["UCI HAR Dataset", "uci_har", "."])
def test_uci_har_is_read_with_published_split(tmp_path, place):
    write_uci_har(tmp_path / place)
    data = load("uci_har", tmp_path)
    for table, split in ((data.train, "train"), (data.test, "test")):
        assert np.array_equal(table.columns["input"].numpy(), uci_signal(split))
        assert table.columns["label"].tolist() == [label - 1 for label in UCI_LABELS[split]]
    assert (data.name, data.held_out, data.rate_hz, data.num_channels) == ("uci_har", ("2", "4"), 50.0, 9)
    assert data.classes[3:5] == ("sitting", "standing")
    assert data.class_counts.tolist() == [1] * 6
    assert "windows of 2.56 s" in data.describe()


def test_uci_har_is_found_in_hub_cache(cache):
    store = cache / "hub" / f"datasets--{UCI_HAR_REPO.replace('/', '--')}"
    (store / "refs").mkdir(parents=True)
    (store / "refs" / "main").write_text(REVISION)
    write_uci_har(store / "snapshots" / REVISION)
    assert len(load("auto").test) == 3


def test_uci_har_with_fold_holds_out_subjects_of_fold(tmp_path):
    write_uci_har(tmp_path)
    data = load("uci_har", tmp_path, fold=0, folds=5)
    assert data.held_out == ("3",), "the subject with most windows comes first"
    assert (len(data.train), len(data.test)) == (6, 3)


X_TEST, ROW = "test/Inertial Signals/body_acc_x_test.txt", "1 " * 128 + "\n"


@pytest.mark.parametrize(
    ("path", "text", "message"),
    [
        ("train/y_train.txt", "1\n2\n3\n4\n5\n7\n", "y_train.txt holds the label 7 in row 5, which is not from 1 to 6"),
        ("train/y_train.txt", "1\n", "has 6 rows for 1 labels"),
        ("test/subject_test.txt", "one\n", "subject_test.txt cannot be read as rows of numbers"),
        (X_TEST, "1 2 3\n" * 3, "has 3 numbers in a row"),
        (X_TEST, ROW * 2 + "inf " * 128, "a number that is not finite in row 2"),
        ("test/y_test.txt", "", "y_test.txt has no rows"),
        (X_TEST, None, f"has no {X_TEST}"),
    ],
)
def test_invalid_uci_har_files_raise(tmp_path, path, text, message):
    write_uci_har(tmp_path)
    (tmp_path / path).unlink()
    if text is not None:
        (tmp_path / path).write_text(text)
    assert message in error_of("uci_har", tmp_path)


def test_hmp_codes_become_g_in_overlapping_windows(tmp_path):
    write_hmp(tmp_path, [("walk", "f1", codes(300)), ("rest", "m1", codes(10, start=5))])
    data = load("hmp", tmp_path, folds=2)
    windows, labels = data.test.columns["input"], data.test.columns["label"]
    g = torch.from_numpy(codes(300)) * (3.0 / 63) - 1.5
    # f1 has most windows and is fold 0: 300 readings have windows at 0, 64 and 128; the next would end at 320.
    expected = torch.stack([g[:, start : start + 128] for start in (0, 64, 128)]).float()
    torch.testing.assert_close(windows, expected)
    assert [data.classes[label] for label in labels.tolist()] == ["walk"] * 3
    short = data.train.columns["input"][0]
    assert torch.equal(short[:, 9:], short[:, 9:10].expand(3, 119)), "a short trial repeats its last reading"
    assert data.class_counts.tolist() == [1, 0]


def test_folds_hold_out_every_volunteer_once(tmp_path):
    write_volunteers(tmp_path)
    folds = [load("hmp", tmp_path, fold=fold, folds=3) for fold in range(3)]
    assert sorted(name for data in folds for name in data.held_out) == sorted(VOLUNTEERS)
    for data in folds:
        assert not first_codes(data.train) & first_codes(data.test)
        assert len(data.train) + len(data.test) == 2 * (1 + 2 + 3 + 4 + 5)


def test_validation_volunteers_are_not_in_train_or_test(tmp_path):
    write_volunteers(tmp_path)
    data, plain = (load("hmp", tmp_path, fold=1, folds=3, validation=validation) for validation in (True, False))
    begins = [first_codes(table) for table in (data.train, data.validation, data.test)]
    assert len(set.union(*begins)) == sum(map(len, begins))
    assert len(data.train) + len(data.validation) == len(plain.train)
    assert data.held_out == plain.held_out


@pytest.mark.parametrize(
    ("trial", "message"),
    [
        (("walk", "f1", codes(200) + 1), "has a reading that is not an integer from 0 to 63 in row 0"),
        (("walk", "f1", np.where(codes(200) == 3, None, codes(200))), "has a reading that is not an integer"),
        (("walk", None, codes(200)), "has a null in row 0"),
        (("walk", "f1", np.zeros((3, 0), int)), "has axes of [0] readings in row 0"),
    ],
)
def test_invalid_hmp_readings_raise(tmp_path, trial, message):
    write_hmp(tmp_path, [trial])
    assert message in error_of("hmp", tmp_path)


def write_trials(path, **changes):
    """Write four subjects with two activities, each with 40 readings of two signals, a row per reading."""
    rows = [(name, done, t / 20, t + 100 * i, -t) for i, name in enumerate("abcd") for done in "xy" for t in range(40)]
    frame = pandas.DataFrame(rows, columns=["subject", "activity", "time", "left", "right"]).assign(**changes)
    frame.to_csv(path) if path.suffix == ".csv" else frame.to_parquet(path)
    return str(path)


def write_subjects(folder, **splits):
    """Write a split for each of `splits`, in which each subject has one trial of 16 readings."""
    for split, subjects in splits.items():
        rows = [{"user": name, "label": "sit", "x": [float(ord(name))] * 16, "y": [2.5] * 16} for name in subjects]
        pandas.DataFrame(rows).to_parquet(folder / f"{split}.parquet")


def test_own_trials_are_cut_by_rate_and_split_by_subject(tmp_path):
    path = write_trials(tmp_path / "trials.csv", index=0)
    data = load(path, rate_hz=20.0, window_seconds=1.0, overlap=0.0, folds=4)
    assert (data.classes, data.num_channels, data.rate_hz) == (("x", "y"), 2, 20.0)
    assert (len(data.train), len(data.test), len(data.held_out)) == (12, 4, 1)
    assert data.notice == "trials.csv has the signals left, right at 20 Hz."
    first = data.test.columns["input"][0]
    assert torch.equal(first[0] - first[0, 0], torch.arange(20.0)), "no window spans two trials"
    assert "rate_hz=None: say how many readings per second" in error_of(path)


@pytest.mark.parametrize(
    "splits",
    [
        {"train": "abc", "test": "d"},
        {"train": "ab", "validation": "c", "test": "d"},
        {"train": "abc", "validation": "d"},
    ],
)
def test_published_splits_of_own_trials_are_kept(splits, tmp_path):
    write_subjects(tmp_path, **splits)

    def subjects(**settings):
        data = load(str(tmp_path), rate_hz=8.0, window_seconds=2.0, **settings)
        assert data.test.columns["input"][0].tolist() == [[float(ord("d"))] * 16, [2.5] * 16]
        tables = [table for table in (data.train, data.validation, data.test) if table is not None]
        return ["".join(chr(int(value)) for value in sorted(first_codes(table))) for table in tables]

    assert subjects() == [splits["train"], "d"]
    train, validation, test = subjects(validation=True)
    assert sorted(train + validation) == ["a", "b", "c"]
    assert test == "d"
    assert ("test" in splits and "validation" in splits) <= (validation == "c")


def test_invalid_own_readings_raise(tmp_path):
    path = write_trials(tmp_path / "trials.parquet", left=[None, *range(319)])
    assert "row 0 of the train split lacks a value" in error_of(path, rate_hz=20.0)
    path = write_trials(tmp_path / "text.csv", left=lambda table: ["broken", *table["left"][1:]])
    assert "row 0 of left is no number: 'broken'" in error_of(path, rate_hz=20.0)
    path = write_trials(tmp_path / "trials.parquet", subject=0.5, left="a", right="b")
    assert "is a signal, a number" in error_of(path, rate_hz=20.0)


def test_data_dir_variable_names_folder_of_datasets(tmp_path, monkeypatch):
    write_volunteers(tmp_path)
    monkeypatch.setenv("TOOLKIT_DATA_DIR", str(tmp_path))
    assert load("auto").name == "hmp"
    write_uci_har(tmp_path / "uci_har")
    assert load("auto").name == "hmp"
    assert load("uci_har").name == "uci_har"


def test_without_dataset_generated_signals_are_used_with_notice():
    data = load("auto")
    assert data.name == "generated"
    assert data.notice == "No hmp (dataset='hmp' says why): made-up volunteers say nothing about people."
    assert load("generated").notice == "Made-up volunteers say nothing about people."
    assert all(name.startswith("made-up") for name in data.held_out)
    pairs = zip(generate_trials(), generate_trials(), strict=True)
    assert all(np.array_equal(a.signal, b.signal) for a, b in pairs)


def test_unavailable_dataset_raises(tmp_path):
    assert "dataset='mnist': there is no such set; choose one of auto, hmp, uci_har, generated" in error_of("mnist")
    assert "does not hold hmp/train-*.parquet; name the folder of the set" in error_of("hmp", tmp_path)
    assert "there is no data_dir and no $TOOLKIT_DATA_DIR; give data_dir, or take generated" in error_of("hmp")
    assert "folds=11: take at most 10, the number of volunteers" in error_of("generated", folds=11)
    write_uci_har(tmp_path / "uci_har")
    assert "published in windows of 2.56 s" in error_of("uci_har", tmp_path, window_seconds=4.0)
    shutil.rmtree(tmp_path / "uci_har" / "test")
    assert "has no test/y_test.txt" in error_of("uci_har", tmp_path)
