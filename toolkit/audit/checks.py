"""The checks of an MoE checkpoint: what is missing, repeated, reordered, empty or broken.

Each value is read once, in parts. Of each expert's matrix a digest is kept, and a sketch: `SKETCH` rows by `SKETCH`
columns of numbers, evenly spaced in each half, by which experts of two checkpoints are compared.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from toolkit.audit.experts import Matrix, count_experts, find_matrices, find_routers, value_of
from toolkit.audit.tensors import Checkpoint, open_checkpoint
from toolkit.errors import UserError

SKETCH = 16
NEAR = 0.5
"""An expert is another one's of the base if its distance to that is below this times the distance to its own."""
MOST_NAMED = 8
GATE_UP = (
    ("gate_proj.weight", "up_proj.weight"),
    ("w1.weight", "w3.weight"),
    ("w1", "w3"),
    ("fc1.weight", "fc3.weight"),
)
"""Names of the two matrices whose product is the hidden activation, gate first."""
MERGES = ("mergekit_config.yml", "mergekit_moe_config.yml")
MOMENTS = "exp_avg", "exp_avg_sq"
MOMENT_BOUND = 23.0
"""Adam's moments have |m| <= c sqrt(v), by the Cauchy-Schwarz inequality, with c = (1 - b1) / sqrt((1 - b2) (1 - b1^2 /
b2)): 7.3 for betas of 0.9 and 0.999, 22.9 for 0.9 and 0.9999."""


@dataclass(frozen=True)
class Finding:
    """A fault, with the tensors that have it."""

    check: str
    message: str
    tensors: list[str]


@dataclass
class Audit:
    """The result of an audit: facts that were checked, and findings."""

    path: str
    facts: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class Summary:
    """What is kept of the values of an expert's matrix, or of another tensor."""

    digest: bytes
    is_zero: bool
    broken: str | None
    """NaN or infinity, if there are any."""
    sketch: NDArray[Any] | None = None


def audit(folder: Path, against: Path | None = None) -> Audit:
    """Check the checkpoint in `folder`.

    Args:
        folder: A folder of safetensors files, a checkpoint of `torch.distributed.checkpoint`, or of a run.
        against: A checkpoint that it was trained or converted from, whose order of experts it should have.

    Raises:
        UserError: A folder cannot be read.
    """
    checkpoint = open_checkpoint(folder)
    found = Audit(str(folder))
    size = f"{len(checkpoint.tensors):,} tensors"
    found.facts.append(f"{checkpoint.kind}, {size}")
    found.findings += [Finding("files", problem, []) for problem in checkpoint.problems]
    matrices = find_matrices(checkpoint)
    layers: dict[str, list[Matrix]] = defaultdict(list)
    for matrix in matrices.values():
        layers[matrix.layer].append(matrix)
    if not layers and checkpoint.tensors:
        found.findings.append(Finding("experts", "no tensor is an expert's", []))
    summaries = summarize(checkpoint, matrices.values(), sketches=against is not None) | summarize_others(
        checkpoint, matrices.values()
    )
    counts = {layer: _count(checkpoint, layers[layer]) for layer in layers}
    for check in (
        _check_complete(checkpoint, layers, counts),
        _check_routers(checkpoint, layers, counts),
        _check_types(checkpoint, layers),
        _check_values(layers, summaries),
        _check_repeats(checkpoint, layers, summaries),
        _check_tied(checkpoint, summaries),
        _check_moments(checkpoint),
    ):
        _collect(found, check)
    if against is not None:
        base = open_checkpoint(against)
        of_base = find_matrices(base)
        common = [of_base[key] for key in matrices if key in of_base]
        if not common:
            raise UserError(
                f"against={str(against)!r}: has no experts of the same names. Give the same format and family."
            )
        _collect(found, _check_order(layers, summaries, of_base, summarize(base, common, sketches=True)))
    return found


def _collect(found: Audit, check: Iterator[str | Finding]) -> None:
    for each in check:
        if isinstance(each, Finding):
            found.findings.append(each)
        else:
            found.facts.append(each)


# --- values ---------------------------------------------------------------------------------------------------------


def summarize(
    checkpoint: Checkpoint, matrices: Iterable[Matrix], *, sketches: bool
) -> dict[tuple[str, int | None], Summary]:
    """Read the values of experts. Keys are a tensor and the first row of an expert."""
    summaries: dict[tuple[str, int | None], Summary] = {}
    for place in sorted({place for matrix in matrices for place in matrix.places.values()}):
        value = value_of(checkpoint, place)
        summaries[place.tensor, place.begin] = _summary([value], _sketch(value) if sketches else None)
    return summaries


def summarize_others(checkpoint: Checkpoint, matrices: Iterable[Matrix]) -> dict[tuple[str, int | None], Summary]:
    """Read the values of all tensors that are no experts. Keys are a tensor and None."""
    of_experts = {place.tensor for matrix in matrices for place in matrix.places.values()}
    return {(name, None): _summary(checkpoint.parts(name)) for name in checkpoint.tensors if name not in of_experts}


def _summary(parts: Iterable[Tensor], sketch: NDArray[Any] | None = None) -> Summary:
    digest, is_zero, broken = hashlib.blake2b(digest_size=16), True, None
    for part in parts:
        read = part.contiguous().reshape(-1).view(torch.uint8)
        digest.update(read.numpy().data)
        is_zero = is_zero and not bool(read.any())
        broken = broken or _broken(part)
    return Summary(digest.digest(), is_zero, broken, sketch)


def _broken(value: Tensor) -> str | None:
    if not value.is_floating_point() or value.numel() == 0:
        return None
    if value.dtype.itemsize < 2:  # float8, which torch does not sum
        value = value.float()
    if value.sum(dtype=torch.promote_types(value.dtype, torch.float32)).isfinite():
        return None
    return "NaN" if value.isnan().any() else "infinity" if value.isinf().any() else None


def _sketch(value: Tensor) -> NDArray[Any] | None:
    """Return (SKETCH, SKETCH) numbers of a matrix, half of its rows and columns from each half, at equal places."""
    if value.ndim < 2 or not value.is_floating_point():
        return None
    value = value.reshape(-1, value.shape[-1])
    index = []
    for size in value.shape:
        half = np.linspace(0, max(size // 2 - 1, 0), SKETCH // 2).astype(int)
        index.append(torch.from_numpy(np.concatenate([half, half + size // 2]).clip(max=size - 1)))
    return np.asarray(value[index[0]][:, index[1]].double().numpy())


# --- checks ---------------------------------------------------------------------------------------------------------


def _count(checkpoint: Checkpoint, matrices: Sequence[Matrix]) -> int:
    return count_experts(checkpoint.config) or 1 + max(expert for m in matrices for expert in m.places)


def _check_complete(
    checkpoint: Checkpoint, layers: Mapping[str, Sequence[Matrix]], counts: Mapping[str, int]
) -> Iterator[str | Finding]:
    complete = True
    usual = _usual(layers.values())
    for layer, matrices in layers.items():
        count = counts[layer]
        for matrix in matrices:
            ids = checkpoint.ids.get(f"{layer}.{matrix.name}") or range(count)
            beyond = sorted(expert for expert in matrix.places if expert not in ids)
            lacking = len(ids) - (len(matrix.places) - len(beyond))
            some = itertools.islice((expert for expert in ids if expert not in matrix.places), MOST_NAMED * MOST_NAMED)
            tensors = _tensors(matrix, matrix.places)
            if lacking:
                said = f"{matrix.name} of {lacking:,} of {len(ids):,} experts is missing: {_named(list(some), lacking)}"
                yield Finding("experts", f"{layer}: {said}", tensors)
            if beyond:
                said = f"{matrix.name} of experts beyond {len(ids):,}: {_named(beyond)}"
                yield Finding("experts", f"{layer}: {said}", tensors)
            complete = complete and not lacking and not beyond
        for name in sorted(usual - {matrix.name for matrix in matrices}):
            complete = False
            yield Finding("experts", f"{layer}: lacks {name}, which most layers have", [])
    if layers and complete:
        counted = ", ".join(map(str, sorted(set(counts.values()))))
        yield f"{len(layers)} layers with {counted} experts, none missing"


def _usual(layers: Iterable[Sequence[Matrix]]) -> set[str]:
    """Return the matrices that more than half of the layers have."""
    kinds = [{matrix.name for matrix in matrices} for matrices in layers]
    names = Counter(name for kind in kinds for name in kind)
    return {name for name, count in names.items() if count > len(kinds) / 2}


def _check_routers(
    checkpoint: Checkpoint, layers: Mapping[str, Sequence[Matrix]], counts: Mapping[str, int]
) -> Iterator[str | Finding]:
    routers = [] if checkpoint.ids else list(find_routers(checkpoint, list(layers)))  # else rows may be inactive
    extra = max(
        (n for key, n in checkpoint.config.items() if key == "zero_expert_num" and isinstance(n, int)), default=0
    )
    wrong = False
    for layer, tensor in routers:
        shape = checkpoint.tensors[tensor].shape
        if counts[layer] + extra not in shape:
            wrong = True
            yield Finding("router", f"{tensor}: has shape {shape} for {counts[layer]} experts", [tensor])
    if routers and not wrong:
        yield f"{len(routers)} routers have a row for each expert"


def _check_types(checkpoint: Checkpoint, layers: Mapping[str, Sequence[Matrix]]) -> Iterator[str | Finding]:
    mixed = False
    for layer, matrices in layers.items():
        for matrix in matrices:
            kinds = Counter(checkpoint.tensors[place.tensor].dtype for place in matrix.places.values())
            shapes = Counter(checkpoint.tensors[place.tensor].shape for place in matrix.places.values())
            for of, found in (("types", kinds), ("shapes", shapes)):
                if len(found) > 1:
                    mixed = True
                    usual = found.most_common(1)[0][0]
                    attribute = "dtype" if of == "types" else "shape"
                    odd = [
                        e for e, p in matrix.places.items() if getattr(checkpoint.tensors[p.tensor], attribute) != usual
                    ]
                    said = ", ".join(map(str, found))
                    yield Finding(
                        "types",
                        f"{layer}: {matrix.name} has several {of}, {said}: {_named(sorted(odd))}",
                        [matrix.places[e].tensor for e in odd],
                    )
    if layers and not mixed:
        yield "one type and shape for each matrix of a layer"


def _check_values(
    layers: Mapping[str, Sequence[Matrix]], summaries: Mapping[tuple[str, int | None], Summary]
) -> Iterator[str | Finding]:
    wrong = False
    for name, summary in sorted((name, s) for (name, begin), s in summaries.items() if begin is None and s.broken):
        wrong = True
        yield Finding("values", f"{name}: has {summary.broken}", [name])
    for layer, matrices in layers.items():
        for matrix in matrices:
            of = {e: summaries[p.tensor, p.begin] for e, p in matrix.places.items()}
            broken = {e: s.broken for e, s in of.items() if s.broken}
            zero = [e for e, s in of.items() if s.is_zero]
            if broken:
                wrong = True
                kinds = " and ".join(sorted(set(filter(None, broken.values()))))
                yield Finding(
                    "values",
                    f"{layer}: {matrix.name} has {kinds} in {_named(sorted(broken))}",
                    _tensors(matrix, broken),
                )
            if zero and len(zero) < len(of):  # biases of all experts may be zero
                wrong = True
                yield Finding(
                    "values", f"{layer}: {matrix.name} is zero in {_named(sorted(zero))}", _tensors(matrix, zero)
                )
    if not wrong:
        yield "no NaN, no infinity, no expert of zeros"


def _check_repeats(
    checkpoint: Checkpoint,
    layers: Mapping[str, Sequence[Matrix]],
    summaries: Mapping[tuple[str, int | None], Summary],
) -> Iterator[str | Finding]:
    """Find experts with the bytes of another expert of their layer, or of another layer.

    Equality of all experts of each layer, as after upcycling, and of a model that is declared to be merged, are facts.
    """
    digests = _digests(checkpoint, layers, summaries)
    holders: dict[bytes, list[tuple[str, int]]] = defaultdict(list)
    for key, of in digests.items():
        for digest in of:
            holders[digest].append(key)
    repeated = {key: [holders[digest][0] for digest in of] for key, of in digests.items()}
    repeated = {key: origins for key, origins in repeated.items() if any(origin != key for origin in origins)}
    if not repeated:
        yield "no expert repeats another expert"
        return
    different: dict[str, set[tuple[bytes, ...]]] = defaultdict(set)
    for (layer, _), of in digests.items():
        different[layer].add(tuple(of))
    if all(len(of) == 1 for of in different.values()):
        yield "all experts of a layer are equal, as after upcycling"
        return
    if declared := _declared_copies(checkpoint):
        yield f"experts repeat others, which {declared} declares"
        return
    copies: dict[tuple[str, str, str], dict[int, int]] = defaultdict(dict)
    for (layer, expert), origins in repeated.items():
        other, original = next(origin for origin in origins if origin != (layer, expert))
        kind = "repeats" if len(set(origins)) == 1 else "repeats a matrix of"
        copies[layer, kind, other][expert] = original
    for (layer, kind, other), pairs in copies.items():
        place = "of the same layer" if layer == other else f"of {other}"
        yield Finding(
            "repeats",
            f"{layer}: {_named(sorted(pairs))} {kind} {_named([pairs[e] for e in sorted(pairs)])} {place}",
            sorted(
                {tensor for matrix in layers[layer] for tensor in _tensors(matrix, pairs.keys() & matrix.places.keys())}
            ),
        )


def _digests(
    checkpoint: Checkpoint,
    layers: Mapping[str, Sequence[Matrix]],
    summaries: Mapping[tuple[str, int | None], Summary],
) -> dict[tuple[str, int], list[bytes]]:
    """Return by layer and expert the digests of its matrices, each with the matrix's name; vectors and zeros aside."""
    digests: dict[tuple[str, int], list[bytes]] = defaultdict(list)
    for layer, matrices in layers.items():
        for matrix in sorted(matrices, key=lambda matrix: matrix.name):
            for expert, place in matrix.places.items():
                summary, shape = summaries[place.tensor, place.begin], checkpoint.tensors[place.tensor].shape
                if len(shape) - (place.size == 1) > 1 and not summary.is_zero:
                    digests[layer, expert].append(matrix.name.encode() + summary.digest)
    return digests


def _declared_copies(checkpoint: Checkpoint) -> str | None:
    """Return the file that declares a merged or upcycled model."""
    merges = [name for name in MERGES if (checkpoint.folder / name).exists()]
    return next(
        iter([*merges, *(["config.json"] if any("upcycled" in key for key in checkpoint.config) else [])]), None
    )


def _check_tied(checkpoint: Checkpoint, summaries: Mapping[tuple[str, int | None], Summary]) -> Iterator[str | Finding]:
    heads = [name for name in checkpoint.tensors if name.endswith("lm_head.weight")]
    tables = [name for name in checkpoint.tensors if name.endswith(("embed_tokens.weight", "wte.weight"))]
    if not checkpoint.config.get("tie_word_embeddings") or len(heads) != 1 or len(tables) != 1:
        return
    if summaries[heads[0], None].digest == summaries[tables[0], None].digest:
        yield f"{heads[0]} equals {tables[0]}, to which config.json ties it"
    else:
        yield Finding("tied", f"{heads[0]} differs from {tables[0]}, to which config.json ties it", [*heads, *tables])


def _check_moments(checkpoint: Checkpoint) -> Iterator[str | Finding]:
    """Find states of an optimizer that do not fit their weight, or each other."""
    wrong = False
    for weight, states in checkpoint.states.items():
        shape = checkpoint.tensors[weight].shape if weight in checkpoint.tensors else None
        if shape is None:
            wrong = True
            yield Finding("moments", f"{weight}: has optimizer states and no weight", [weight])
            continue
        for state, listed in states.items():
            if len(listed.shape) == len(shape) > 0 and state in MOMENTS and listed.shape != shape:
                wrong = True
                yield Finding("moments", f"{weight}: {state} has shape {listed.shape}, the weight {shape}", [weight])
        if all(state in states and states[state].shape == shape for state in MOMENTS) and shape:
            mean, square = (checkpoint.rows(weight, state, 0, shape[0]).double() for state in MOMENTS)
            if (square < 0).any() or (mean.abs() > MOMENT_BOUND * square.sqrt() + 1e-12).any():
                wrong = True
                yield Finding("moments", f"{weight}: exp_avg and exp_avg_sq are not of the same gradients", [weight])
    if checkpoint.states and not wrong:
        yield f"optimizer states of {len(checkpoint.states):,} weights fit them"


def _check_order(
    layers: Mapping[str, Sequence[Matrix]],
    summaries: Mapping[tuple[str, int | None], Summary],
    of_base: Mapping[tuple[str, str], Matrix],
    base: Mapping[tuple[str, int | None], Summary],
) -> Iterator[str | Finding]:
    """Find experts that are nearer to another expert of the base, and gates that are nearer to its other half."""
    wrong = False
    for layer, matrices in layers.items():
        sketches: dict[int, list[NDArray[Any]]] = defaultdict(list)
        theirs: dict[int, list[NDArray[Any]]] = defaultdict(list)
        for matrix in matrices:
            other = of_base.get((layer, matrix.name))
            if other is None:
                continue
            for expert in matrix.places.keys() & other.places.keys():
                mine, their = matrix.places[expert], other.places[expert]
                a, b = summaries[mine.tensor, mine.begin].sketch, base[their.tensor, their.begin].sketch
                if a is not None and b is not None:
                    sketches[expert].append(a)
                    theirs[expert].append(b)
        experts = sorted(sketches)
        if not experts:
            continue
        x_ED, y_ED = (
            np.stack([np.concatenate([s.ravel() for s in of[e]]) for e in experts]) for of in (sketches, theirs)
        )
        distance_EE = np.linalg.norm(x_ED[:, None] - y_ED[None], axis=-1)
        own_E, nearest_E = distance_EE.diagonal(), distance_EE.argmin(1)
        moved = [i for i in range(len(experts)) if distance_EE[i, nearest_E[i]] < NEAR * own_E[i]]
        if moved:
            wrong = True
            pairs = ", ".join(f"{experts[i]} is {experts[nearest_E[i]]}" for i in moved[:MOST_NAMED])
            more = f" and {len(moved) - MOST_NAMED} more" if len(moved) > MOST_NAMED else ""
            yield Finding("order", f"{layer}: experts are in another order than in the base: {pairs}{more}", [])
            continue
        if swapped := _swapped_halves(matrices, layer, summaries, of_base, base):
            wrong = True
            yield Finding("halves", f"{layer}: gate and up are swapped in {_named(swapped)}", [])
    if not wrong:
        yield "experts, gates and ups are in the order of the base"


def _swapped_halves(
    matrices: Sequence[Matrix],
    layer: str,
    summaries: Mapping[tuple[str, int | None], Summary],
    of_base: Mapping[tuple[str, str], Matrix],
    base: Mapping[tuple[str, int | None], Summary],
) -> list[int]:
    """Return the experts whose gate is nearer to the base's up than to its gate, and the other way round."""
    swapped: set[int] = set()
    named = {matrix.name: matrix for matrix in matrices}

    def sketch(of: Mapping[tuple[str, int | None], Summary], matrix: Matrix | None, expert: int) -> NDArray[Any] | None:
        place = matrix.places.get(expert) if matrix else None
        return None if place is None else of[place.tensor, place.begin].sketch

    for matrix in matrices:
        other = of_base.get((layer, matrix.name))
        for expert in matrix.places:
            a, b = sketch(summaries, matrix, expert), sketch(base, other, expert)
            if a is None or b is None or not ("gate_up" in matrix.name or "w13" in matrix.name):
                continue
            own = np.linalg.norm(a - b)
            if any(np.linalg.norm(np.roll(a, SKETCH // 2, axis) - b) < NEAR * own for axis in (0, 1)):
                swapped.add(expert)
    for gate, up in GATE_UP:
        if gate in named and up in named:
            for expert in named[gate].places:
                a, b = sketch(summaries, named[gate], expert), sketch(base, of_base.get((layer, gate)), expert)
                c = sketch(base, of_base.get((layer, up)), expert)
                if a is None or b is None or c is None:
                    continue
                if np.linalg.norm(a - c) < NEAR * np.linalg.norm(a - b):
                    swapped.add(expert)
    return sorted(swapped)


def _tensors(matrix: Matrix, experts: Iterable[int]) -> list[str]:
    return sorted({matrix.places[expert].tensor for expert in experts})


def _named(experts: Sequence[int], count: int | None = None) -> str:
    """Return "expert(s) 1, 2, 5-7": runs of ids, at most `MOST_NAMED` of them."""
    runs: list[list[int]] = []
    for expert in experts:
        if runs and expert == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], expert]
        else:
            runs.append([expert])
    said = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs[:MOST_NAMED])
    more = " and more" if len(runs) > MOST_NAMED or (count or 0) > len(experts) else ""
    return f"expert(s) {said}{more}"
