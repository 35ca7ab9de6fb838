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


def test_loads_of_other_programs_are_counts_of_choices(tmp_path: Path):
    ids, none = choices(), np.zeros((STEPS, 1, EXPERTS), int)
    counts = np.concatenate([none, loads_of(ids)[:, :, 0]], 1)
    np.savez(tmp_path / "trace.npz", *(step.transpose(1, 0, 2).astype(np.int16) for step in ids))
    np.save(tmp_path / "trace.npy", counts.astype(np.float32))
    torch.save({"rank": 0, "logical_count": torch.tensor(counts)}, tmp_path / "trace.pt")
    for path in tmp_path.iterdir():
        assert np.array_equal(read_recorded(path), loads_of(ids)), path


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
    advice = (
        f"Turn rebalancing on: `--replan.planner lpt --replan.every 20` saves {1 - moved / stay:.0%} of the predicted"
    )
    assert f"{advice} step time. An imbalance of 1.14 remains: replay with `--spare-slots 1`." in printed
