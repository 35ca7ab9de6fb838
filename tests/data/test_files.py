"""The key of what was decoded changes with the content of files; a list of digests beside them is checked."""

import hashlib
import os
from pathlib import Path

import pytest
import torch

import toolkit.data.files
from tests.data.layouts import TRAIN, idx, write_idx_set, write_parquet_set
from toolkit.data.files import check_digest, content_key
from toolkit.data.images import load_images
from toolkit.errors import UserError

SMALL = {"everything is read": 2**27, "a part is read": 100}


@pytest.fixture(params=SMALL)
def limit(request, monkeypatch):
    monkeypatch.setattr(toolkit.data.files, "MOST_BYTES", SMALL[request.param])


def write_like(path: Path, content: bytes, other: Path | None = None) -> Path:
    """A file with the times of `other`, or of 2020."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    os.utime(path, ns=(0, 0) if other is None else (0, other.stat().st_mtime_ns))
    return path


@pytest.mark.usefixtures("limit")
def test_files_of_one_name_size_and_time_have_keys_of_their_own(tmp_path):
    one = write_like(tmp_path / "a" / "train", bytes(1000) + b"1")
    same = content_key([one])
    assert content_key([write_like(one, bytes(1000) + b"1")]) == same
    assert content_key([write_like(one, bytes(1000) + b"2")]) != same
    assert content_key([write_like(one, b"2" + bytes(999) + b"1")]) != same
    assert content_key([write_like(tmp_path / "a" / "test", bytes(1000) + b"1")]) != same
    assert content_key([one, one]) != same


def test_a_set_that_was_moved_keeps_its_key_where_all_of_it_is_read(tmp_path):
    keys = {content_key([write_like(tmp_path / place / "train", b"text")]) for place in "ab"}
    assert len(keys) == 1


def test_the_middle_of_a_large_file_is_told_by_its_time(tmp_path, monkeypatch):
    monkeypatch.setattr(toolkit.data.files, "MOST_BYTES", 100)
    monkeypatch.setattr(toolkit.data.files, "PART_BYTES", 10)
    one = write_like(tmp_path / "train", bytes(1000))
    before = content_key([one])
    one.write_bytes(bytes(500) + b"1" + bytes(499))
    assert content_key([one]) != before


def test_of_very_many_files_some_are_opened(tmp_path, monkeypatch):
    monkeypatch.setattr(toolkit.data.files, "MOST_BYTES", 10)
    monkeypatch.setattr(toolkit.data.files, "PARTS", 5)
    files = [write_like(tmp_path / str(index), b"text") for index in range(50)]
    opened, really_open = [], Path.open
    monkeypatch.setattr(Path, "open", lambda self, *how: opened.append(self.name) or really_open(self, *how))
    content_key(files)
    assert 3 <= len(opened) <= 5


def test_sets_that_look_alike_from_outside_train_on_their_own_data(tmp_path):
    first, second = (write_idx_set(tmp_path / name / "mnist") for name in ("first", "second"))
    labels = second / "train-labels-idx1-ubyte"
    labels.write_bytes(idx((TRAIN[1] + 1) % 10))
    for path in first.iterdir():
        os.utime(second / path.name, ns=(0, path.stat().st_mtime_ns))
    loaded = [load_images("mnist", folder, on_main=lambda decide: decide()).train for folder in (first, second)]
    assert torch.equal((loaded[0].columns["label"] + 1) % 10, loaded[1].columns["label"])


def sums(folder: Path) -> str:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return "".join(f"{hashlib.sha256(p.read_bytes()).hexdigest()} *./{p.relative_to(folder)}\n" for p in paths)


def test_a_file_that_differs_from_the_list_beside_it_is_refused(tmp_path):
    folder = write_parquet_set(tmp_path / "mnist")
    (tmp_path / "SHA256SUMS").write_text(sums(tmp_path))
    load_images("mnist", folder, on_main=lambda decide: decide())
    damaged = folder / "train-00001-of-00002.parquet"
    content = bytearray(damaged.read_bytes())
    content[100] ^= 1
    damaged.write_bytes(content)
    with pytest.raises(UserError, match=f"{damaged} does not match its SHA-256 in {tmp_path / 'SHA256SUMS'}: replace"):
        load_images("mnist", folder, on_main=lambda decide: decide())


def test_a_list_that_comes_later_is_heeded_though_the_set_was_decoded_before(tmp_path):
    folder = write_parquet_set(tmp_path / "mnist")
    load_images("mnist", folder, on_main=lambda decide: decide())
    (folder / "SHA256SUMS").write_text(f"{'0' * 64}  test-00000-of-00001.parquet\n")
    with pytest.raises(UserError, match=r"test-00000-of-00001\.parquet does not match its SHA-256"):
        load_images("mnist", folder, on_main=lambda decide: decide())


def test_files_that_no_list_names_and_lists_of_another_form_are_no_fault(tmp_path):
    path = write_like(tmp_path / "train", b"text")
    check_digest(path)
    (tmp_path / "SHA256SUMS").write_text("\n# a remark\nabc\n" + "0" * 64 + "  another file\n")
    check_digest(path)
