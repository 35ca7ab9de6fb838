"""`toolkit lab` on the files of other programs."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from toolkit.commands import main
from toolkit.lab.recorded import read_recorded

STEPS, LAYERS, TOKENS, TOP_K, EXPERTS = 5, 2, 30, 2, 6


def choices() -> np.ndarray:
    """Return different experts for each token, (steps, layers, tokens, K), with a dense first layer of zeros."""
    draws = np.random.default_rng(0).random((STEPS, LAYERS + 1, TOKENS, EXPERTS))
    ids = draws.argsort(-1)[..., -TOP_K:]
    ids[:, 0] = 0
    return ids


def loads_of(ids: np.ndarray) -> np.ndarray:
    return (ids[:, 1:, :, :, None] == np.arange(EXPERTS)).sum((2, 3))[:, :, None]


def write(path: Path, ids: np.ndarray) -> None:
    counts = np.concatenate([np.zeros((STEPS, 1, EXPERTS), int), loads_of(ids)[:, :, 0]], 1)
    if path.suffix == ".npz":
        np.savez(path, *(step.transpose(1, 0, 2).astype(np.int16) for step in ids))
    elif path.suffix == ".npy":
        np.save(path, counts.astype(np.float32))
    else:
        torch.save({"rank": 0, "logical_count": torch.tensor(counts)}, path)


@pytest.mark.parametrize("suffix", [".pt", ".npz", ".npy"])
def test_loads_of_other_programs_are_counts_of_choices(suffix: str, tmp_path: Path):
    ids = choices()
    write(tmp_path / f"trace{suffix}", ids)
    assert np.array_equal(read_recorded(tmp_path / f"trace{suffix}"), loads_of(ids))


def test_traces_of_megatron_have_a_source_for_each_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    ids = choices()
    for rank, here in enumerate((slice(0, 10), slice(10, TOKENS))):
        with (tmp_path / f"router_trace_rank{rank}.jsonl").open("w") as file:
            for step, layer in np.ndindex(STEPS, LAYERS):
                for part in np.array_split(ids[step, layer + 1, here], 2):  # micro-batches
                    record = {"step": 3 + step, "block": "decoder", "layer": 10 * layer, "rank": rank, "topk": TOP_K}
                    file.write(json.dumps({**record, "top_indices": part.tolist()}) + "\n")
    expected = np.concatenate([loads_of(ids[:, :, :10]), loads_of(ids[:, :, 10:])], 2)
    path = tmp_path / "router_trace_rank1.jsonl"
    assert np.array_equal(read_recorded(path), expected)
    assert main(["lab", str(path), "--every", "2", "--planner", "lpt"]) == 0
    assert f"{EXPERTS} experts on 2 ranks, {LAYERS} layer(s), {STEPS} steps" in capsys.readouterr().out


def test_one_matrix_of_loads_is_replayed_as_two_windows(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    np.save(tmp_path / "loads.npy", np.array([[400_000, 300_000, 5, 5, 5, 5, 5]]))
    assert main(["lab", str(tmp_path / "loads.npy"), "--ranks", "2", "--planner", "lpt"]) == 0
    printed = capsys.readouterr().out
    assert "8 experts on 2 ranks, 1 layer(s), 40 steps" in printed
    rows = [line for line in printed.splitlines() if line.startswith(("| stay |", "| lpt, guarded |"))]
    stay, moved = (float(line.split("|")[-3]) for line in rows)
    assert moved < 0.7 * stay
    assert f"`lpt`, guarded, saves {1 - moved / stay:.0%} of the time of the experts." in printed


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.npy", b"\x93NUMPY\x01\x00", "cannot be read"),
        ("a.jsonl", b'{"step": 0, "layer": 1, "top_indices": [[99999999999]]}\n', "ids that no expert has"),
        ("a.pt", b"\x80\x04", "cannot be read"),
    ],
)
def test_damaged_traces_exit_with_code_2(
    name: str, content: bytes, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / name).write_bytes(content)
    assert main(["lab", str(tmp_path / name)]) == 2
    assert said in capsys.readouterr().err
