"""Loading images: which set, from where, decoded to the right tensors; and one sentence for all that can be wrong."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.data.layouts import TEST, TRAIN, fill_hub_cache, png, write_parquet, write_parquet_set
from tests.support.helpers import run_distributed
from toolkit.data.images import HUB_REPOS, ImageData, load_images
from toolkit.data.table import TensorTable
from toolkit.errors import UserError
from toolkit.run.config.run import RunConfig

TEST_PARQUET = "test-00000-of-00001.parquet"

REAL_MNIST = Path(os.environ.get("TOOLKIT_DATA_DIR", "nowhere")) / "mnist"
"""Read here, because the tests themselves run without the variable."""


def load(dataset: str = "auto", data_dir: Path | None = None) -> ImageData:
    return load_images(dataset, data_dir, on_main=lambda decide: decide())


def refusal(dataset: str, data_dir: Path | None = None) -> str:
    """The one sentence that loading is refused with."""
    with pytest.raises(UserError) as caught:
        load(dataset, data_dir)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def assert_holds(table: TensorTable, images: np.ndarray, labels: np.ndarray) -> None:
    assert table.columns["input"].dtype == torch.uint8
    assert table.columns["label"].dtype == torch.int64
    assert np.array_equal(table.columns["input"].numpy(), images)
    assert np.array_equal(table.columns["label"].numpy(), labels)


# --- where sets are found


def test_load_images_folder_of_the_set_is_read(tmp_path):
    data = load("auto", write_parquet_set(tmp_path / "images"))
    assert_holds(data.train, *TRAIN)
    assert_holds(data.test, *TEST)
    assert (data.name, data.notice, data.num_classes) == ("mnist", None, 10)


def test_load_images_folder_read_as_named_set_has_another_cache_entry(tmp_path):
    folder = write_parquet_set(tmp_path / "images")
    assert load("mnist", folder).num_classes == 10
    assert "no training row has the label 4 of row 0" in refusal(str(folder))


def test_a_set_is_read_from_a_folder_of_sets(tmp_path):
    write_parquet_set(tmp_path / "fashion_mnist")
    data = load("fashion_mnist", tmp_path)
    assert_holds(data.train, *TRAIN)
    assert data.name == "fashion_mnist"


def test_the_environment_names_a_folder_of_sets(tmp_path, monkeypatch):
    write_parquet_set(tmp_path / "mnist")
    monkeypatch.setenv("TOOLKIT_DATA_DIR", str(tmp_path))
    assert load("auto").name == "mnist"
    assert load("mnist").name == "mnist"


def test_a_folder_named_after_one_set_is_not_taken_for_another(tmp_path):
    folder = write_parquet_set(tmp_path / "fashion_mnist")
    assert "does not hold train-*.parquet" in refusal("mnist", folder)


def test_real_mnist_has_the_published_counts_or_a_small_set_its_own(tmp_path):
    real = REAL_MNIST.is_dir()
    data = load("mnist", REAL_MNIST if real else write_parquet_set(tmp_path))
    assert (len(data.train), len(data.test)) == ((60_000, 10_000) if real else (7, 3))
    mean, std = (0.1307, 0.3081) if real else (np.mean(TRAIN[0] / 255), np.std(TRAIN[0] / 255))
    assert (data.mean, data.std) == (pytest.approx(mean, abs=1e-4), pytest.approx(std, abs=1e-4))


@pytest.mark.parametrize("name", HUB_REPOS)
def test_a_set_in_the_cache_of_the_hub_is_found_offline_unless_a_folder_is_named(cache, tmp_path, name):
    folder = fill_hub_cache(cache / "hub", HUB_REPOS[name], name)
    assert_holds(load(name).train, *TRAIN)
    assert "does not hold" in refusal(name, tmp_path)
    (folder / TEST_PARQUET).unlink()
    assert "not in the Hub's cache" in refusal(name)
    assert "HF_HUB_OFFLINE" in refusal(name)


# --- the digits


def test_without_mnist_auto_takes_the_embedded_digits_and_says_so_in_a_line():
    data = load("auto")
    assert data.name == "digits"
    assert data.notice == "No MNIST (dataset='mnist' says why): training on scikit-learn's 1,797 digits."
    assert len(data.notice) <= 80
    assert "there is no data_dir and no $TOOLKIT_DATA_DIR; " in refusal("mnist")


def test_the_digits_are_split_evenly_over_classes_and_scaled_to_the_size_of_mnist():
    data = load("digits")
    assert data.notice is None
    assert (len(data.train), len(data.test)) == (1442, 355)
    held_out = data.test.columns["label"].bincount() / (
        data.train.columns["label"].bincount() + data.test.columns["label"].bincount()
    )
    assert ((held_out > 0.19) & (held_out <= 0.2)).all()
    images = data.train.columns["input"]
    assert images.shape == (1442, 28, 28)
    assert (images.min(), images.max()) == (0, 255)


# --- what is refused


@pytest.mark.parametrize("dataset", ["mnist", "fashion_mnist"])
def test_a_set_asked_for_by_name_is_never_replaced(dataset):
    message = refusal(dataset)
    assert "was not found" in message
    assert "data_dir" in message


@pytest.mark.parametrize("dataset", ["auto", "mnist"])
def test_a_data_dir_that_does_not_hold_the_set_is_refused_even_with_auto(dataset, tmp_path):
    assert str(tmp_path) in refusal(dataset, tmp_path)
    assert "absent" in refusal(dataset, tmp_path / "absent")


def test_load_images_auto_damaged_set_raises(tmp_path, monkeypatch):
    folder = write_parquet_set(tmp_path / "mnist")
    (folder / TEST_PARQUET).write_bytes(b"PAR1 no more")
    monkeypatch.setenv("TOOLKIT_DATA_DIR", str(tmp_path))
    assert str(folder) in refusal("auto")


ONE_IMAGE = png(TEST[0][0])


# --- your own


def write_classes(folder: Path, shape: tuple[int, ...], count: int = 20) -> Path:
    """A folder of images for each class, which are as bright as the class says."""
    for place, name in enumerate(("bird", "cat")):
        (folder / name).mkdir(parents=True)
        for number in range(count // 2):
            pixels = np.full(shape, 50 + 100 * place, np.uint8)
            pixels[0, 0] = number
            (folder / name / f"{number}.png").write_bytes(png(pixels))
    return folder


def test_a_folder_for_each_class_is_a_set_of_any_size_and_colour(tmp_path):
    write_classes(tmp_path / "animals" / "train", (12, 20, 3))
    write_classes(tmp_path / "animals" / "test", (12, 20, 3), count=4)
    data = load(str(tmp_path / "animals"))
    assert (data.name, data.shape, data.num_classes, data.notice) == ("animals", (3, 12, 20), 2, None)
    assert (len(data.train), len(data.test)) == (20, 4)
    assert data.train.columns["input"][:, 0, 5, 5].tolist() == [50] * 10 + [150] * 10
    assert data.train.columns["label"].tolist() == [0] * 10 + [1] * 10


def test_a_set_without_a_test_split_holds_out_a_tenth_of_each_class_and_says_so(tmp_path):
    data = load(str(write_classes(tmp_path / "animals", (9, 9))))
    assert data.shape == (9, 9)
    assert data.test.columns["label"].tolist() in ([0, 1], [1, 0])
    assert data.notice == "animals: it has no test split: 2 of 20 rows, drawn with seed 0, are held out."


def test_validation_images_of_ones_own_set_are_a_tenth_of_each_class(tmp_path):
    folder = str(write_classes(tmp_path / "animals", (9, 9), count=40))
    data = load_images(folder, None, validation=True, on_main=lambda decide: decide())
    assert sorted(data.validation.columns["label"].tolist()) == [0, 0, 1, 1]
    assert data.notice.endswith("are held out. 4 of 36 training images, drawn with seed 0, are for validation.")
    tables = (data.train, data.validation, data.test)
    seen = [(label, int(image[0, 0])) for table in tables for image, label in zip(*table.columns.values(), strict=True)]
    assert len(set(seen)) == len(seen) == 40
    for_choices = load(f"{folder}:validation")
    assert torch.equal(for_choices.test.columns["input"], data.validation.columns["input"])


def test_rows_of_a_file_have_labels_that_are_words_or_numbers_and_a_validation_split(tmp_path):
    for split, words in {"train": ["no", "yes"] * 3, "test": ["yes"], "validation": ["no"]}.items():
        write_parquet(tmp_path / f"{split}.parquet", [ONE_IMAGE] * len(words), words, image="img")
    data = load_images(str(tmp_path), None, validation=True, on_main=lambda decide: decide())
    assert [len(table) for table in (data.train, data.test, data.validation)] == [6, 1, 1]
    assert data.validation.columns["label"].tolist() == [0]
    write_parquet(tmp_path / "test.parquet", [ONE_IMAGE], ["perhaps"], image="img")
    assert "no training row has the label 'perhaps' of row 0" in refusal(str(tmp_path))


def test_load_images_labels_beyond_the_number_of_images(tmp_path):
    write_parquet(tmp_path / "images.parquet", [ONE_IMAGE] * 20, [7, 10**9] * 10)
    assert load(str(tmp_path / "images.parquet")).num_classes == 2


def test_load_images_path_outside_folder_raises(tmp_path):
    (tmp_path / "private.png").write_bytes(ONE_IMAGE)
    folder = tmp_path / "set"
    write_parquet(folder / "train.parquet", [None] * 20, [0, 1] * 10, named=str(tmp_path / "private.png"))
    assert "private.png: is outside the folder of the data set" in refusal(str(folder))
    write_parquet(folder / "train.parquet", [None] * 20, [0, 1] * 10, named=str(folder / "train.parquet"))
    assert f"row 0, {folder / 'train.parquet'}: cannot be read" in refusal(str(folder))


def test_load_images_class_without_training_images_raises(tmp_path):
    for split, name in (("train", "a"), ("train", "b"), ("test", "a"), ("test", "c")):
        (tmp_path / split / name).mkdir(parents=True)
        (tmp_path / split / name / "0.png").write_bytes(ONE_IMAGE)
    assert "no training row has the label 2 of row 1" in refusal(str(tmp_path))


@pytest.mark.parametrize("path", ["./no_such_folder", "~/no/such/folder", "no/such/folder"])
def test_load_images_path_that_does_not_exist_raises(path):
    assert f"dataset='{path}': no such file or folder" in refusal(path)


def test_images_of_16_bits_keep_their_upper_8(tmp_path):
    ramp = (np.arange(81, dtype=np.uint16) * 800).reshape(9, 9)
    write_parquet(tmp_path / "ramps.parquet", [png(ramp)] * 20, [0, 1] * 10)
    data = load(str(tmp_path / "ramps.parquet"))
    assert np.array_equal(data.train.columns["input"][0].numpy(), (ramp >> 8).astype(np.uint8))


@pytest.mark.parametrize(
    ("images", "fault"),
    [
        ([ONE_IMAGE] * 19 + [png(TEST[0][0][:20])], "the image of row 1 has shape (20, 28)"),
        ([png(np.full((5, 5), 7, np.uint8))] * 20, "all pixels of the training images have one value"),
        ([ONE_IMAGE] * 19 + [b"no image"], "cannot be read"),
        ([ONE_IMAGE] * 20, "cannot be read (TypeError"),  # an error of the library
    ],
)
def test_images_that_no_model_can_learn_from_are_refused(tmp_path, images, fault):
    write_parquet(tmp_path / "images.parquet", images, [[0]] * 20 if "TypeError" in fault else [0, 1] * 10)
    assert fault in refusal(str(tmp_path / "images.parquet"))


# --- several processes


def load_on_each_rank(dataset: str, data_dir: Path) -> tuple[str, int]:
    from accelerate import Accelerator

    from toolkit.run.run import Run

    run = Run("test", RunConfig(cpu=True), Accelerator(cpu=True), owns_process_group=False)
    try:
        data = load_images(dataset, data_dir, on_main=run.on_main_and_share)
    except UserError as error:
        return str(error), 0
    return data.name, int(data.train.columns["label"].sum())


def test_all_ranks_get_the_same_set_or_the_same_refusal(tmp_path):
    folder = write_parquet_set(tmp_path / "mnist")
    assert run_distributed(load_on_each_rank, 2, "auto", folder) == [("mnist", int(TRAIN[1].sum()))] * 2
    (folder / TEST_PARQUET).write_bytes(b"")
    first, second = run_distributed(load_on_each_rank, 2, "auto", folder)
    assert first == second
    assert str(folder) in first[0]


def test_validation_images_are_the_last_of_the_training_split():
    whole, held = (load_images(name, None, on_main=lambda decide: decide()) for name in ("digits", "digits:validation"))
    assert held.name == "digits:validation"
    assert len(held.test) == len(whole.train) // 12
    for name, column in whole.train.columns.items():
        parts = torch.cat([held.train.columns[name], held.test.columns[name]])
        assert torch.equal(parts, column), "all of the training split, each image once, and none of the test images"
