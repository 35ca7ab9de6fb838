"""Expert loads that other programs recorded: SGLang, vLLM, Megatron-LM, and matrices for EPLB."""

from __future__ import annotations

import json
import re
import zipfile
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.experts.placement.loads import Ints
from toolkit.experts.routing.traces import arrays_of, read_array
from toolkit.torch_files import load_plain

MOST_EXPERTS = 2**16
"""Larger expert ids are damage."""
OF_RANK = re.compile(r"(?P<name>.*rank)(?P<rank>\d{1,9})\.jsonl")


def read_recorded(path: Path) -> Ints:
    """Return the loads in a file of another program, int64 (steps, layers, source ranks, experts).

    Layers without a router and steps without tokens are left out. The number of experts is the highest id plus 1,
    unless the file has counts.

    Args:
        path: `.pt` of SGLang's expert distribution recorder in the mode `stat`; `.npz` with arrays of vLLM's
            `routed_experts`, (tokens, layers, K), a step each; `.jsonl` of Megatron-LM's `--moe-routing-trace-path`,
            with the files of other ranks next to it; or `.npy` with counts, (layers, experts) or (steps, layers,
            experts).

    Raises:
        ValueError: The file has another content.
    """
    loads = READERS[path.suffix](path)
    loads = loads[:, loads.any((0, 2, 3))]
    loads = loads[loads.any((1, 2, 3))]
    if not loads.size:
        raise ValueError("it has no tokens")
    return loads


def is_of_other_program(path: Path) -> bool:
    """Whether `read_recorded` reads this file, and not `read_trace`."""
    if path.suffix != ".npz" or not zipfile.is_zipfile(path):
        return path.suffix in READERS and path.suffix != ".npz"
    with zipfile.ZipFile(path) as file:
        return "metadata.npy" not in file.namelist()


def _of_counts(path: Path) -> Ints:
    return _without_sources(np.load(path, mmap_mode="r", allow_pickle=False))  # a mapping has no more than the file


def _of_sglang(path: Path) -> Ints:
    saved = load_plain(path)
    if not isinstance(saved, dict) or not hasattr(saved.get("logical_count"), "numpy"):
        raise ValueError("it has no logical_count. Record with --expert-distribution-recorder-mode stat")
    return _without_sources(saved["logical_count"].numpy())


def _without_sources(counts: NDArray[Any]) -> Ints:
    if counts.ndim not in (2, 3) or counts.dtype.kind not in "iuf":
        raise ValueError(f"its counts are {counts.dtype} of shape {counts.shape}")
    if not np.isfinite(counts).all() or (counts < 0).any() or (counts >= 2**53).any():
        raise ValueError("its counts are negative, too large or not finite")
    return np.rint(counts).astype(np.int64).reshape(-1, counts.shape[-2], 1, counts.shape[-1])


def _of_vllm(path: Path) -> Ints:
    with arrays_of(path) as file:
        steps = [read_array(file, name.removesuffix(".npy")) for name in file.namelist()]
    if any(ids.ndim != 3 or ids.dtype.kind not in "iu" for ids in steps):
        raise ValueError("its arrays are not expert ids of (tokens, layers, K)")
    # A layer without a router has zeros only, and a token has no expert twice.
    found = {
        (number, layer): [ids[:, layer]]
        for number, ids in enumerate(steps)
        for layer in range(ids.shape[1])
        if ids.shape[2] == 1 or ids[:, layer].any()
    }
    return _counted([found])


def _of_megatron(path: Path) -> Ints:
    ranks = {path: 0}
    if own := OF_RANK.fullmatch(path.name):
        near = {each: OF_RANK.fullmatch(each.name) for each in path.parent.glob("*.jsonl")}
        ranks = {each: int(m["rank"]) for each, m in near.items() if m and m["name"] == own["name"]}
    return _counted([_records(each) for each in sorted(ranks, key=ranks.__getitem__)])


def _records(path: Path) -> Mapping[tuple[int, Hashable], Sequence[NDArray[Any]]]:
    found: dict[tuple[int, Hashable], list[NDArray[Any]]] = defaultdict(list)
    with path.open(encoding="utf-8") as lines:
        for record in map(json.loads, filter(str.strip, lines)):
            layer = str(record.get("block", "")), record.get("mtp_idx", -1), record["layer"]
            found[int(record["step"]), layer].append(np.array(record["top_indices"], dtype=np.int64))
    return found


def _counted(sources: Sequence[Mapping[tuple[int, Any], Sequence[NDArray[Any]]]]) -> Ints:
    """Count expert ids by step and layer, for each source rank."""
    keys = [sorted({key[axis] for found in sources for key in found}) for axis in (0, 1)]
    steps, layers = ({key: place for place, key in enumerate(of)} for of in keys)
    ids = [each for found in sources for many in found.values() for each in many if each.size]
    if not ids or min(each.min() for each in ids) < 0 or (most := max(int(each.max()) for each in ids)) >= MOST_EXPERTS:
        raise ValueError("it has no expert ids, or ids that no expert has")
    loads = np.zeros((len(steps), len(layers), len(sources), most + 1), dtype=np.int64)
    for source, found in enumerate(sources):
        for (step, layer), many in found.items():
            for each in many:
                counts = np.bincount(each.reshape(-1), minlength=most + 1)
                loads[steps[step], layers[layer], source] += counts
    return loads


READERS = {".pt": _of_sglang, ".npz": _of_vllm, ".jsonl": _of_megatron, ".npy": _of_counts}
"""By suffix."""
