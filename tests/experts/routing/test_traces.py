"""Traces: one record per training forward pass, and files that read back equal."""

import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.special_files import replace_by_pipe
from toolkit.errors import UserError
from toolkit.experts.layer.moe_layer import Experts, make_moe
from toolkit.experts.layer.recompute import checkpoint
from toolkit.experts.placement.placement import ExpertPlacement, contiguous
from toolkit.experts.routing.traces import TraceFile, read_trace
from toolkit.train.callbacks import trace_recorder
from toolkit.train.callbacks.trace_recorder import TraceRecorder

FACTS = {"layers": ["block"], "world_size": 2, "ep_size": 2, "row_bytes": [[8, 8]]}


def write(path: Path) -> np.ndarray:
    load_FLSE = np.arange(5 * 2 * 3).reshape(5, 1, 2, 3)
    file = TraceFile(path)
    swapped = ExpertPlacement(((2, 1), (0, -1)))
    blocks = contiguous(3, 2, slots_per_rank=2)
    file.add(load_FLSE[:2], [0, 0], [blocks])
    file.add(load_FLSE[2:4], [1, 1], [blocks])
    file.add(load_FLSE[4:], [2], [swapped])
    assert not path.exists(), "an incomplete trace has another name"
    file.close(FACTS)
    return load_FLSE


def test_trace_reads_back_as_written(tmp_path: Path):
    (tmp_path / "traces.npz.part").symlink_to("outside")
    load_FLSE = write(tmp_path / "traces.npz")
    trace = read_trace(tmp_path / "traces.npz")
    assert (trace.load_FLSE == load_FLSE).all()
    assert trace.step_F.tolist() == [0, 0, 1, 1, 2]
    assert [(first, str(placement[0])) for first, placement in trace.placements] == [
        (0, "rank 0 | 0 1\nrank 1 | 2 ."),
        (4, "rank 0 | 2 1\nrank 1 | 0 ."),
    ]
    sums = np.stack([load_FLSE[:2].sum(0), load_FLSE[2:4].sum(0), load_FLSE[4]])
    assert (trace.load_TLSE() == sums).all()
    assert list(tmp_path.iterdir()) == [tmp_path / "traces.npz"]


def set_format(path: Path) -> None:
    arrays = dict(np.load(path))
    facts = json.loads(arrays["metadata"].tobytes()) | {"format": 2}
    np.savez(path, **arrays | {"metadata": np.frombuffer(json.dumps(facts).encode(), dtype=np.uint8)})


def add_large_array(path: Path) -> None:
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as file:
        file.writestr("load_99999.npy", bytes(2**27))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "text": lambda path: path.write_text("not a trace"),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:200]),
    "other arrays": lambda path: np.savez(path, weights=np.zeros(3)),
    "no loads": lambda path: np.savez(path, **dict(np.load(path)) | {"load_00002": np.zeros((1, 2, 3), np.int32)}),
    "newer format": set_format,
    "pipe": replace_by_pipe,
    "zip bomb": add_large_array,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_read_trace_of_a_damaged_file_raises(tmp_path: Path, damage: str):
    path = tmp_path / "traces.npz"
    write(path)
    DAMAGES[damage](path)
    reason = ".*bytes unpacked" if damage == "zip bomb" else ""
    with pytest.raises(UserError, match=rf"traces\.npz: cannot be read{reason}"):
        read_trace(path)


def test_trace_recorder_in_a_custom_loop_records_training_forward_passes_once(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_recorder, "CHUNK", 3)
    torch.manual_seed(0)
    model = nn.ModuleDict({"first": make_moe(4, 8, 3, 2), "second": make_moe(4, 8, 3, 1)})
    recorder = TraceRecorder(Experts.of(model), tmp_path / "own.npz", name="mine")
    expected = []
    for step in range(4):
        for _ in range(2):
            x = torch.randn(5, 4, requires_grad=True)
            y = checkpoint(model["second"], checkpoint(model["first"], x))
            y.sum().backward()
            expected.append([model[name].last_load_E.tolist() for name in model])
        with torch.no_grad():
            model["first"](torch.randn(7, 4))
        recorder.step_done(step)
    recorder.close()
    trace = read_trace(tmp_path / "own.npz")
    assert trace.load_FLSE[:, :, 0].tolist() == expected
    assert trace.step_F.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert (trace.layers, trace.metadata["name"]) == (["first", "second"], "mine")
    assert trace.load_FLSE.sum() == 8 * 5 * (2 + 1)


def test_trace_recorder_of_unequal_layers_raises(tmp_path: Path):
    model = nn.ModuleDict({"first": make_moe(4, 8, 3, 2), "second": make_moe(4, 8, 3, 1)})
    recorder = TraceRecorder(Experts.of(model), tmp_path / "own.npz")
    model["first"](torch.randn(5, 4))
    with pytest.raises(UserError, match="'first': 1, 'second': 0"):
        recorder.step_done(0)
    unequal = nn.ModuleList(make_moe(4, 4, experts, 1) for experts in (2, 3))
    with pytest.raises(UserError, match=r"have \[2, 3\] experts"):
        TraceRecorder(Experts.of(unequal), tmp_path / "traces.npz")
