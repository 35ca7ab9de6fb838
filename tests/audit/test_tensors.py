"""Damaged or hostile checkpoints raise one error, and run no code."""

import json
import pickle
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.audit.models import build, write
from tests.support.special_files import replace_by_pipe
from toolkit.audit.checks import audit
from toolkit.errors import UserError

FILE = "model-00001-of-00003.safetensors"
INDEX = "model.safetensors.index.json"


class Writes:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (str(self.path), "w")


def call_in_pickle(module: str, function: str, argument: str) -> bytes:
    strings = [b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, function, argument)]
    return b"\x80\x04" + strings[0] + strings[1] + b"\x93" + strings[2] + b"\x85R."


def header(text: bytes, size: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if size is None else size) + text


def entries(folder: Path, weight_map: object) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def save_pickled(folder: Path, value: object) -> None:
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    torch.save(value, folder / "pytorch_model.bin")


def zip_pickled(folder: Path, pickled: bytes) -> None:
    save_pickled(folder, {})
    with zipfile.ZipFile(folder / "pytorch_model.bin", "w") as file:
        file.writestr("archive/data.pkl", pickled)


HASHED = b"\x80\x02})" + b"q\x01h\x01\x86" * 60 + b"Ns."
"""A dictionary with a key of 60 tuples in tuples."""
HOSTILE: dict[str, Callable[[Path], object]] = {
    "no safetensors": lambda folder: [path.unlink() for path in folder.glob("*.safetensors*")],
    "long header": lambda folder: (folder / FILE).write_bytes(header(b"{}", 2**62)),
    "invalid header": lambda folder: (folder / FILE).write_bytes(header(b"[[[[")),
    "long offsets": lambda folder: (folder / FILE).write_bytes(
        header(b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}')
    ),
    "huge shape": lambda folder: (folder / FILE).write_bytes(
        header(b'{"a":{"dtype":"F32","shape":[4294967295,4294967295],"data_offsets":[0,16]}}' + b"\0" * 16)
    ),
    "empty file": lambda folder: (folder / FILE).write_bytes(b""),
    "pipe": lambda folder: replace_by_pipe(folder / FILE),
    "config is a pipe": lambda folder: replace_by_pipe(folder / "config.json"),
    "deep JSON": lambda folder: (folder / "config.json").write_text("[" * 200_000),
    "number as config": lambda folder: (folder / "config.json").write_text("3"),
    "index outside": lambda folder: entries(folder, {"a": "../../etc/passwd"}),
    "index of numbers": lambda folder: entries(folder, {"a": 3}),
    "link to a device": lambda folder: ((folder / FILE).unlink(), (folder / FILE).symlink_to("/dev/zero")),
    "dangling link": lambda folder: ((folder / FILE).unlink(), (folder / FILE).symlink_to("/nowhere")),
    "code in metadata": lambda folder: (folder / ".metadata").write_bytes(pickle.dumps(Writes(folder / "ran"))),
    "code of a module of metadata": lambda folder: (folder / ".metadata").write_bytes(
        call_in_pickle("torch.serialization", "os.mkdir", str(folder / "ran"))
    ),
    "attribute of a class in metadata": lambda folder: (folder / ".metadata").write_bytes(
        b"\x80\x04cpathlib\nPosixPath\nN(X\x0a\x00\x00\x00__fspath__cpathlib\nPosixPath\nd\x86b."
    ),
    "huge memo index in metadata": lambda folder: (folder / ".metadata").write_bytes(b"\x80\x04Nr\0\0\0\x40."),
    "huge bytes in metadata": lambda folder: (folder / ".metadata").write_bytes(b"\x80\x05\x96\0\0\0\0\0\x01\0\0."),
    "huge text in metadata": lambda folder: (folder / ".metadata").write_bytes(b"\x80\x04\x8d" + bytes(7) + b"\x10."),
    "hash of 2**60 values in metadata": lambda folder: (folder / ".metadata").write_bytes(HASHED),
    "hash of 2**60 values in a pickled file": lambda folder: zip_pickled(folder, HASHED),
    "code in a pickled file": lambda folder: save_pickled(folder, Writes(folder / "ran")),
    "huge view in a pickled file": lambda folder: save_pickled(folder, {"a": torch.ones(1).expand(2**50)}),
    "manifest": lambda folder: (folder / "manifest.json").write_text("{}"),
}


@pytest.mark.parametrize("damage", HOSTILE.values(), ids=HOSTILE)
def test_audit_of_hostile_files_exits_with_one_line(tmp_path: Path, damage: Callable[[Path], object], toolkit: Any):
    folder = write(tmp_path / "model", "mixtral", build("mixtral"))
    damage(folder)
    code, text = toolkit("audit", folder)
    assert code == 2
    (line,) = text.splitlines()
    assert str(folder) in line
    assert not (folder / "ran").exists()


def test_audit_of_huge_empty_tensor_reports_it(tmp_path: Path):
    state = build("qwen3_moe") | {"model.layers.0.mlp.experts.extra": torch.empty(10**9, 0)}
    (finding,) = audit(write(tmp_path, "qwen3_moe", state)).findings
    assert "1 tensors have no values" in finding.message


def test_audit_of_billion_configured_experts_reports_missing(tmp_path: Path):
    write(tmp_path, "qwen3_moe", build("qwen3_moe"), num_experts=10**9, num_hidden_layers=10**9)
    assert "999,999,992 of 1,000,000,000 experts is missing" in audit(tmp_path).findings[0].message


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda metadata: metadata.state_dict_metadata["a"].chunks.clear(), "'a' has 0 of 2 values"),
        (lambda metadata: setattr(metadata.state_dict_metadata["a"], "size", [2**60]), "'a' has 2 of 1,152,"),
        (lambda metadata: setattr(metadata.state_dict_metadata["a"], "size", [-2, -1]), "negative dimension"),
        (lambda metadata: metadata.storage_data.clear(), "a part of 'a' is in no file"),
        (lambda metadata: setattr(*metadata.storage_data.values(), "length", 9999), "__0_0.distcp is shorter"),
        (
            lambda metadata: setattr(*metadata.storage_data.values(), "relative_path", "../a"),
            "'../a' is outside of the",
        ),
    ],
)
def test_audit_of_metadata_without_all_values_raises(damage: Callable[[Any], None], message: str, tmp_path: Path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warns about a single process
        dcp.save({"a": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    path = tmp_path / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    damage(metadata)
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(UserError, match=message):
        audit(tmp_path)
