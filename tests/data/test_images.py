"""Image data sets: search paths, decoding and errors."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.data.layouts import TEST, TRAIN, fill_hub_cache, png, write_parquet, write_parquet_set
from toolkit.data.images import HUB_REPOS, ImageData, load_images
from toolkit.data.table import TensorTable
from toolkit.errors import UserError

TEST_PARQUET = "test-00000-of-00001.parquet"

ONE_IMAGE = png(TEST[0][0])


def load(dataset: str | Path = "auto", data_dir: Path | None = None, **options: bool) -> ImageData:
    return load_images(str(dataset), data_dir, **options, on_main=lambda decide: decide())


def error_of(dataset: str | Path, data_dir: Path | None = None) -> str:
    with pytest.raises(UserError) as error:
        load(dataset, data_dir)
    assert "\n" not in str(error.value)
    return str(error.value)


def assert_equal(table: TensorTable, images: np.ndarray, labels: np.ndarray) -> None:
    assert table.columns["input"].dtype == torch.uint8
    assert table.columns["label"].dtype == torch.int64
    assert np.array_equal(table.columns["input"].numpy(), images)
    assert np.array_equal(table.columns["label"].numpy(), labels)


def test_folder_of_a_named_set_is_read(tmp_path):
    folder = write_parquet_set(tmp_path / "images")
    data = load("auto", folder)
    assert_equal(data.train, *TRAIN)
    assert_equal(data.test, *TEST)
    assert (data.name, data.notice, data.num_classes) == ("mnist", None, 10)
    assert (data.mean, data.std) == pytest.approx((np.mean(TRAIN[0] / 255), np.std(TRAIN[0] / 255)))
    assert "no training row has the label 4 of row 0" in error_of(folder), "another cache entry"


def test_named_set_is_read_from_its_subfolder(tmp_path):
    folder = write_parquet_set(tmp_path / "fashion_mnist")
    data = load("fashion_mnist", tmp_path)
    assert_equal(data.train, *TRAIN)
    assert data.name == "fashion_mnist"
    assert "does not hold train-*.parquet" in error_of("mnist", folder)


def test_data_dir_is_read_from_the_environment(tmp_path, monkeypatch):
    folder = write_parquet_set(tmp_path / "mnist")
    monkeypatch.setenv("TOOLKIT_DATA_DIR", str(tmp_path))
    assert load("auto").name == "mnist"
    assert load("mnist").name == "mnist"
    (folder / TEST_PARQUET).write_bytes(b"PAR1 no more")
    assert str(folder) in error_of("auto"), "damaged files are not replaced by the digits"


@pytest.mark.parametrize("name", HUB_REPOS)
def test_named_set_is_read_from_the_hub_cache(cache, tmp_path, name):
    assert "there is no data_dir and no $TOOLKIT_DATA_DIR; " in error_of(name)
    folder = fill_hub_cache(cache / "hub", HUB_REPOS[name], name)
    assert_equal(load(name).train, *TRAIN)
    assert f"{tmp_path} does not hold" in error_of(name, tmp_path)
    (folder / TEST_PARQUET).unlink()
    message = error_of(name)
    assert " was not found (" in message
    assert "not in the Hub's cache" in message
    assert "HF_HUB_OFFLINE" in message
    assert "Give data_dir" in message


def test_auto_without_mnist_loads_digits_with_a_notice(tmp_path):
    data = load("auto")
    assert data.name == "digits"
    assert data.notice == "No MNIST (dataset='mnist' says why): training on scikit-learn's 1,797 digits."
    assert str(tmp_path / "absent") in error_of("auto", tmp_path / "absent")


def test_digits_are_stratified_and_have_the_size_of_mnist():
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


def write_classes(folder: Path, shape: tuple[int, ...], count: int = 20) -> Path:
    """Write a folder of images per class, with class-dependent brightness."""
    for place, name in enumerate(("bird", "cat")):
        (folder / name).mkdir(parents=True)
        for number in range(count // 2):
            pixels = np.full(shape, 50 + 100 * place, np.uint8)
            pixels[0, 0] = number
            (folder / name / f"{number}.png").write_bytes(png(pixels))
    return folder


def test_class_folders_of_any_image_shape_are_read(tmp_path):
    write_classes(tmp_path / "animals" / "train", (12, 20, 3))
    write_classes(tmp_path / "animals" / "test", (12, 20, 3), count=4)
    data = load(tmp_path / "animals")
    assert (data.name, data.shape, data.num_classes, data.notice) == ("animals", (3, 12, 20), 2, None)
    assert (len(data.train), len(data.test)) == (20, 4)
    assert data.train.columns["input"][:, 0, 5, 5].tolist() == [50] * 10 + [150] * 10
    assert data.train.columns["label"].tolist() == [0] * 10 + [1] * 10


def test_missing_test_split_is_held_out_per_class(tmp_path):
    data = load(write_classes(tmp_path / "animals", (9, 9)))
    assert data.shape == (9, 9)
    assert data.test.columns["label"].tolist() in ([0, 1], [1, 0])
    assert data.notice == "animals: it has no test split: 2 of 20 rows, drawn with seed 0, are held out."


def test_validation_images_are_held_out_per_class(tmp_path):
    folder = write_classes(tmp_path / "animals", (9, 9), count=40)
    data = load(folder, validation=True)
    assert sorted(data.validation.columns["label"].tolist()) == [0, 0, 1, 1]
    assert data.notice.endswith("are held out. 4 of 36 training images, drawn with seed 0, are for validation.")
    tables = (data.train, data.validation, data.test)
    seen = [(label, int(image[0, 0])) for table in tables for image, label in zip(*table.columns.values(), strict=True)]
    assert len(set(seen)) == len(seen) == 40
    assert torch.equal(load(f"{folder}:validation").test.columns["input"], data.validation.columns["input"])


def test_parquet_files_with_text_labels_and_a_validation_split(tmp_path):
    for split, words in {"train": ["no", "yes"] * 3, "test": ["yes"], "validation": ["no"]}.items():
        write_parquet(tmp_path / f"{split}.parquet", [ONE_IMAGE] * len(words), words, image="img")
    data = load(tmp_path, validation=True)
    assert [len(table) for table in (data.train, data.test, data.validation)] == [6, 1, 1]
    assert data.validation.columns["label"].tolist() == [0]
    write_parquet(tmp_path / "test.parquet", [ONE_IMAGE], ["perhaps"], image="img")
    assert "no training row has the label 'perhaps' of row 0" in error_of(tmp_path)


def test_labels_larger_than_the_number_of_images_are_ids(tmp_path):
    write_parquet(tmp_path / "images.parquet", [ONE_IMAGE] * 20, [7, 10**9] * 10)
    assert load(tmp_path / "images.parquet").num_classes == 2


def test_image_path_outside_the_folder_raises(tmp_path):
    (tmp_path / "private.png").write_bytes(ONE_IMAGE)
    folder = tmp_path / "set"
    write_parquet(folder / "train.parquet", [None] * 20, [0, 1] * 10, named=str(tmp_path / "private.png"))
    assert "private.png: is outside the folder of the data set" in error_of(folder)
    write_parquet(folder / "train.parquet", [None] * 20, [0, 1] * 10, named=str(folder / "train.parquet"))
    assert f"row 0, {folder / 'train.parquet'}: cannot be read" in error_of(folder)


@pytest.mark.parametrize("path", ["./no_such_folder", "~/no/such/folder", "no/such/folder"])
def test_missing_path_raises(path):
    assert f"dataset='{path}': no such file or folder" in error_of(path)


def test_images_with_16_bits_keep_their_upper_8_bits(tmp_path):
    ramp = (np.arange(81, dtype=np.uint16) * 800).reshape(9, 9)
    write_parquet(tmp_path / "ramps.parquet", [png(ramp)] * 20, [0, 1] * 10)
    data = load(tmp_path / "ramps.parquet")
    assert np.array_equal(data.train.columns["input"][0].numpy(), (ramp >> 8).astype(np.uint8))


@pytest.mark.parametrize(
    ("images", "fault"),
    [
        ([ONE_IMAGE] * 19 + [png(TEST[0][0][:20])], "the image of row 1 has shape (20, 28)"),
        ([png(np.full((5, 5), 7, np.uint8))] * 20, "all pixels of the training images have one value"),
        ([ONE_IMAGE] * 19 + [b"no image"], "cannot be read"),
        ([ONE_IMAGE] * 20, "cannot be read (TypeError"),
    ],
)
def test_invalid_images_raise(tmp_path, images, fault):
    write_parquet(tmp_path / "images.parquet", images, [[0]] * 20 if "TypeError" in fault else [0, 1] * 10)
    assert fault in error_of(tmp_path / "images.parquet")


def test_validation_images_of_a_named_set_end_its_training_split():
    full, held = load("digits"), load("digits:validation")
    assert held.name == "digits:validation"
    assert len(held.test) == len(full.train) // 12
    for name, column in full.train.columns.items():
        assert torch.equal(torch.cat([held.train.columns[name], held.test.columns[name]]), column)
