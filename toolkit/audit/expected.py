"""The tensors that a checkpoint should have: those of its base, of transformers' model, or of its other layers."""

from __future__ import annotations

import itertools
import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from toolkit.audit.checkpoint import Checkpoint, Listed
from toolkit.audit.experts import COUNTS, EXPERT, ROW_OF_RUN, count_experts, settings_of_experts
from toolkit.audit.findings import MOST_NAMED, runs
from toolkit.integrations.transformers.compat import MOST_LAYERS, require_few_layers, tensors_in_files

UNQUANTIZED = {"f64", "f32", "f16", "bf16", "float64", "float32", "float16", "bfloat16"}
DEPTHS = ("num_layers", "n_layers", "num_hidden_layers", "n_layer")
"""Fields with the number of layers."""
MOST_EXPERTS = 2**16
"""Larger claims are not held against transformers' model, whose modules would be made one by one."""
IN_LAYER = re.compile(r"(?P<stack>.*?)\.(?P<number>\d{1,9})\.(?P<rest>.+)")
NOT_EXPECTED = re.compile(r"inv_freq$|(^|\.)mtp\.")
"""Tensors of a base that a checkpoint may lack: buffers of old versions, and multi-token prediction."""


@dataclass
class Expected(Checkpoint):
    """Names and shapes, without values."""

    kind = "expected tensors"
    source: str = ""
    """Who has them, such as "the base has"."""
    parameter_of: Callable[[str], str] = field(default=str)
    """Gives a name in files, also of another format, its parameter."""

    def rows(self, name: str, state: str | None, begin: int, end: int) -> Tensor:
        raise NotImplementedError(name)  # of expected tensors, nothing is read


def count_layers(config: Mapping[str, Any]) -> int | None:
    """Return the number of layers by the config."""
    settings = settings_of_experts(config) or config
    return next((n for name in DEPTHS if isinstance(n := settings.get(name), int) and n > 0), None)


def find_expected(checkpoint: Checkpoint, base: Checkpoint | None, experts: Iterable[str]) -> Expected:
    """Return what `checkpoint` should have: all tensors if there is a base or transformers' model, else experts.

    Args:
        checkpoint: The checkpoint.
        base: The model that it was made from.
        experts: Its tensors of experts.
    """
    if base is not None:
        return _of_base(checkpoint, base)
    depth, width = count_layers(checkpoint.config) or 0, count_experts(checkpoint.config) or 0
    if 0 < depth * width <= MOST_EXPERTS:
        try:
            require_few_layers(checkpoint.config)
            kind, shapes, parameter_of = tensors_in_files(checkpoint.config, COUNTS)
        except Exception:  # any setting may be wrong, or of a family that transformers does not have
            return _of_layers(checkpoint, experts)
        listed = {name: Listed(shape, "", "") for name, shape in shapes.items()}
        found = Expected(checkpoint.folder, checkpoint.config, listed, source=f"transformers' {kind} has")
        found.parameter_of = parameter_of
        if _has_names_of(checkpoint, found):
            return found
    return _of_layers(checkpoint, experts)


def _of_base(checkpoint: Checkpoint, base: Checkpoint) -> Expected:
    """Return the tensors of the base in the layers that the checkpoint's configuration has."""
    depth = count_layers(checkpoint.config)
    ties = checkpoint.config.get("tie_word_embeddings")
    listed = {
        name: each
        for name, each in base.tensors.items()
        if not (NOT_EXPECTED.search(name) or (ties and name.endswith("lm_head.weight")))
        and not (depth and (match := IN_LAYER.match(name)) and int(match["number"]) >= depth)
    }
    return Expected(base.folder, base.config, listed, source="the base has")


def _of_layers(checkpoint: Checkpoint, experts: Iterable[str]) -> Expected:
    """Return the matrices of experts that most layers have, for each layer that should have experts.

    These are layers with experts, missing layers, and layers whose other tensors are all in a layer with experts.
    """
    of_experts = set(map(collapsed, experts))
    stacks: dict[str, tuple[dict[int, set[str]], dict[int, set[str]]]] = {}
    """Names of other tensors and of experts, by number."""
    for name in map(collapsed, checkpoint.tensors):
        if match := IN_LAYER.match(name):
            parts = stacks.setdefault(match["stack"], (defaultdict(set), defaultdict(set)))
            parts[name in of_experts][int(match["number"])].add(match["rest"])
    found = Expected(checkpoint.folder, checkpoint.config, source="most layers have")
    for stack, (others, sparse) in stacks.items():
        depth = 0 if NOT_EXPECTED.search(f"{stack}.") else count_layers(checkpoint.config) or 0
        counts = Counter(itertools.chain.from_iterable(sparse.values()))
        usual = [name for name, count in counts.items() if count > len(sparse) / 2]
        first, last = min(others.keys() | sparse.keys()), max(others.keys() | sparse.keys())
        numbers = range(0 if last < depth else first, max(last + 1, min(depth, last + 1 + MOST_LAYERS)))
        for number in numbers if len(numbers) <= MOST_EXPERTS else sorted(others.keys() | sparse.keys()):
            if number in sparse or any(others.get(number, set()) <= others.get(each, set()) for each in sparse):
                found.tensors |= {f"{stack}.{number}.{name}": Listed((), "", "") for name in usual}
    return found


def collapsed(name: str) -> str:
    """Return the name with `*` instead of an expert's number, or without it if it follows the parameter's name."""
    if match := EXPERT.fullmatch(name):
        return f"{match['layer']}.*.{match['matrix']}"
    return name.rpartition("/")[0] if ROW_OF_RUN.fullmatch(name) else name


def find_missing(checkpoint: Checkpoint, expected: Expected) -> list[str]:
    """Return the expected names that have no tensor, in a quantized form or under an older name."""
    stored = {collapsed(name): each for name, each in checkpoint.tensors.items()}
    wanted = dict.fromkeys(map(collapsed, expected.tensors))
    lacking = [name for name in wanted if name not in stored]
    if lacking:
        renamed = {expected.parameter_of(name) for name in stored if name not in wanted}
        ordered = sorted(stored)
        lacking = [
            name
            for name in lacking
            if expected.parameter_of(name) not in renamed and not _is_stored_otherwise(name, stored, ordered)
        ]
    return lacking


def _has_names_of(checkpoint: Checkpoint, expected: Expected) -> bool:
    """Whether the checkpoint names its tensors as expected: fewer are unknown than are missing."""
    known = {expected.parameter_of(name) for name in expected.tensors}
    wanted = set(map(collapsed, expected.tensors))
    others = {collapsed(name) for name in checkpoint.tensors} - wanted
    unknown = [name for name in others if expected.parameter_of(name) not in known and not _plain(name, wanted)]
    return not unknown or 2 * len(unknown) < len(find_missing(checkpoint, expected))


def extends(name: str, plain: str) -> bool:
    """Whether `name` is a part of the quantized matrix `plain`: `w1.qweight` of `w1.weight`, `up_blocks` of `up`."""
    return name != plain and name.startswith(plain.removesuffix("weight")) and not name.endswith("bias")


def _is_stored_otherwise(name: str, stored: Mapping[str, Listed], ordered: Sequence[str]) -> bool:
    """Whether a tensor that extends `name` is stored, or the matrix that `name` extends without being quantized."""
    stem = name.removesuffix("weight")
    near = itertools.takewhile(lambda other: other.startswith(stem), ordered[bisect_left(ordered, stem) :])
    if any(extends(other, name) for other in near):
        return True
    return any(stored[plain].dtype.lower() in UNQUANTIZED for plain in _plain(name, stored))


def _plain(name: str, names: Iterable[str]) -> list[str]:
    """Return the matrices in `names` that `name` extends."""
    cuts = (name[: match.start()] for match in re.finditer(r"[._]", name))
    return [each for cut in cuts for each in (cut, f"{cut}.weight") if each in names and extends(name, each)]


def by_layers(names: Iterable[str], expected: Expected) -> Iterator[tuple[str, str]]:
    """Yield where tensors are missing and which, for each group of layers that lack the same."""
    layers: dict[tuple[str, int], list[str]] = defaultdict(list)
    for name in names:
        if match := IN_LAYER.match(name):
            layers[match["stack"], int(match["number"])].append(match["rest"])
        else:
            yield "the model", name
    wanted = set(map(collapsed, expected.tensors))
    whole = Counter((match[1], int(match[2])) for name in wanted if (match := IN_LAYER.match(name)))
    alike: dict[tuple[str, str], list[int]] = defaultdict(list)
    for (stack, number), lacking in sorted(layers.items()):
        more = f" and {len(lacking) - MOST_NAMED} more" if len(lacking) > MOST_NAMED else ""
        said = ", ".join(lacking[:MOST_NAMED]) + more
        alike[stack, "all tensors" if len(lacking) == whole[stack, number] else said].append(number)
    for (stack, said), numbers in alike.items():
        yield f"{stack}.{runs(numbers)}", said
