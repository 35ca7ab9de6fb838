"""The files of a checkpoint and the keys of its tensors.

model.safetensors           non-expert parameters and buffers, by name; written by the main process
optimizer.safetensors       their optimizer states, "<parameter>.<state>"
experts-00000.safetensors   expert rows, written by each rank that owns some: "<parameter>/<uid>" and
experts-00001.safetensors   "<parameter>/<uid>/<state>"; each keeps its row dimension of 1
"""

from __future__ import annotations

import re

MODEL, OPTIMIZER, ROWS = "model.safetensors", "optimizer.safetensors", "experts-{rank:05d}.safetensors"

ROW = re.compile(r"(?P<parameter>.+)/(?P<uid>\d+)(?:/(?P<state>[^/]+))?")
"""A key of an expert row or of its optimizer state."""
NUMBER = " (number)"
"""Suffix to the key of an optimizer state that is a Python number, such as a step."""


def weight_of_key(file: str, key: str) -> tuple[str, str | None]:
    """Return the weight, or row "<parameter>/<uid>", of `key` in `file`, and its optimizer state if it is one."""
    if file == OPTIMIZER:
        weight, _, state = key.rpartition(".")
        return weight, state
    match = None if file == MODEL else ROW.fullmatch(key)
    return (key, None) if match is None else (f"{match['parameter']}/{match['uid']}", match["state"])
