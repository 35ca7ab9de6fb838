"""The checks of an MoE checkpoint for missing, repeated, reordered, empty or broken tensors.

Each value is read once, in parts. A digest and a sketch of each expert's matrix are kept. The sketch has `SKETCH` rows
by `SKETCH` columns, evenly spaced in each half, and serves to compare experts of two checkpoints.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from toolkit.audit.expected import (
    MOST_NAMED,
    UNQUANTIZED,
    Expected,
    by_layers,
    extends,
    find_expected,
    find_missing,
    runs,
)
from toolkit.audit.experts import Matrix, Place, count_experts, find_matrices, find_routers, value_of
from toolkit.audit.tensors import AdapterFiles, Checkpoint, Listed, open_checkpoint
from toolkit.errors import UserError
from toolkit.experts.state.tensor_files import first_not_finite
from toolkit.integrations.transformers.compat import names_of_separate_experts
from toolkit.progress_bar import progress

SKETCH = 16
NEAR = 0.5
"""An expert is another one's of the base if its distance to that is below this times the distance to its own."""
FAR = 1.2
"""An expert is none of the base's if its distance to each is above this times the norm: 1.41 for independent values."""
PIECE = 2**22
"""Elements that are converted at a time."""
SAMPLES = 64
"""Elements that are compared before all are."""
GATE_UP = {"gate_proj.weight": "up_proj.weight", "w1.weight": "w3.weight", "w1": "w3", "fc1.weight": "fc3.weight"}
"""Gate -> the matrix that it multiplies, if they are not one tensor."""
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


@dataclass(frozen=True)
class Summary:
    """Summary of the values of an expert's matrix, or of another tensor."""

    digest: bytes
    is_constant: bool
    """Whether all elements are equal, as in the zero points of a symmetric quantization."""
    is_zero: bool
    rows: int
    zero_rows: int
    """Rows of zeros, counted if the first or the last row is one."""
    broken: str | None
    """NaN or infinity, if there are any."""
    sketch: NDArray[Any] | None = None


Summaries = Mapping[Place, Summary]


def audit(folder: Path, against: Path | None = None) -> Audit:
    """Check the checkpoint in `folder`.

    Args:
        folder: A folder of safetensors files or adapters, a checkpoint of `torch.distributed.checkpoint`, or of a run.
        against: A checkpoint that it was trained or converted from, whose order of experts it should have; for
            adapters, the base model.

    Raises:
        UserError: A folder cannot be read.
    """
    checkpoint = open_checkpoint(folder)
    found = Audit(str(folder))
    found.facts.append(f"{checkpoint.kind}, {len(checkpoint.tensors):,} tensors")
    found.findings += [Finding("files", problem, []) for problem in checkpoint.problems]
    if not checkpoint.tensors:
        return found
    base = None if against is None else open_checkpoint(against)
    if base is not None and (isinstance(checkpoint, AdapterFiles) or not checkpoint.config):
        checkpoint.config = base.config
    matrices = find_matrices(checkpoint)
    layers: dict[str, list[Matrix]] = defaultdict(list)
    for matrix in matrices.values():
        layers[matrix.layer].append(matrix)
    if not layers:
        found.findings.append(Finding("experts", "no tensor is an expert's", []))
    places = {place for matrix in matrices.values() for place in matrix.places.values()}
    others = checkpoint.tensors.keys() - {place.tensor for place in places}
    summaries = summarize(checkpoint, places, sketches=against is not None)
    summaries |= {Place(name): _summary(checkpoint.parts(name)) for name in progress(others, "reading other tensors")}
    experts = {place.tensor for place in places}
    expected = find_expected(checkpoint, base, experts)
    counts = _counts(checkpoint, layers, expected)
    checks: list[Iterator[str | Finding]] = [
        _check_complete(checkpoint, layers, counts, expected.tensors),
        _check_routers(checkpoint, layers, counts, expected.tensors),
        _check_types(checkpoint, layers),
        _check_values(checkpoint, layers, others, summaries),
        _check_repeats(checkpoint, layers, summaries),
        _check_tied(checkpoint, summaries),
        _check_moments(checkpoint),
    ]
    if isinstance(checkpoint, AdapterFiles):
        checks.append(_check_adapters(checkpoint, layers, summaries))
        if base is not None:
            checks.append(_check_base(checkpoint, layers, base))
    else:
        checks.append(_check_missing(checkpoint, expected))
    if base is not None and not isinstance(checkpoint, AdapterFiles):
        of_base = {key: matrix for key, matrix in find_matrices(base).items() if key in matrices}
        cut = list(_check_shapes(checkpoint, matrices, base, of_base))
        of_base = {key: m for key, m in of_base.items() if _shape(base, m) == _shape(checkpoint, matrices[key])}
        if not of_base and not cut:
            raise UserError(
                f"against={str(against)!r}: has no experts of the same names and shapes. Give the same format and "
                "family."
            )
        common = {place for matrix in of_base.values() for place in matrix.places.values()}
        checks += [iter(cut), _check_order(layers, summaries, of_base, summarize(base, common, sketches=True))]
    for results in map(list, checks):
        findings = [each for each in results if isinstance(each, Finding)]
        found.findings += findings
        if not findings:
            found.facts += [each for each in results if isinstance(each, str)]
    if isinstance(checkpoint, AdapterFiles):
        found.findings = [
            replace(each, tensors=sorted(checkpoint.keys[name] for name in each.tensors)) for each in found.findings
        ]
    return found


def _shape(checkpoint: Checkpoint, matrix: Matrix) -> tuple[int, ...]:
    """Return the shape of one expert's matrix."""
    place = next(iter(matrix.places.values()))
    shape = checkpoint.tensors[place.tensor].shape
    return shape if place.size is None else (place.size, *shape[1:])


# --- values ---------------------------------------------------------------------------------------------------------


def summarize(checkpoint: Checkpoint, places: Iterable[Place], *, sketches: bool) -> dict[Place, Summary]:
    """Read the values at `places`, in the order of tensors."""
    summaries = {}
    for place in progress(sorted(places), "reading experts"):
        value = value_of(checkpoint, place)
        summaries[place] = _summary([value], _sketch(value) if sketches else None)
    return summaries


def _summary(parts: Iterable[Tensor], sketch: NDArray[Any] | None = None) -> Summary:
    digest, constants, rows, zero_rows, broken = hashlib.blake2b(digest_size=16), set(), 0, 0, None
    for part in (part.contiguous() for part in parts if part.numel()):
        digest.update(part.reshape(-1).view(torch.uint8).numpy().data)
        constants.add(_constant(part))
        rows_RD = part.reshape(-1, part.shape[-1] if part.ndim > 1 else 1)
        rows += len(rows_RD)
        if not (rows_RD[0].any() and rows_RD[-1].any()):
            pieces = rows_RD.split(max(1, PIECE // rows_RD.shape[1]))
            zero_rows += sum(len(piece) - int(piece.any(1).sum()) for piece in pieces)
        broken = broken or _broken(part)
    is_constant = len(constants) == 1 and None not in constants
    return Summary(digest.digest(), is_constant, rows == zero_rows, rows, zero_rows, broken, sketch)


def _constant(value: Tensor) -> bytes | None:
    """Return the bytes of the element that all others equal, None if there are several."""
    elements = value.reshape(-1, 1).view(torch.uint8)
    first = elements[:1]
    if bool((elements[:: max(1, len(elements) // SAMPLES)] != first).any()):
        return None
    return None if any(bool((piece != first).any()) for piece in elements.split(PIECE)) else first.numpy().tobytes()


def _broken(value: Tensor) -> str | None:
    if not value.is_floating_point():
        return None
    for piece in value.reshape(-1).split(PIECE):
        if piece.dtype.itemsize < 2:  # float8, which torch does not sum
            piece = piece.float()
        if first_not_finite([("", piece)]) is not None:
            return "NaN" if piece.isnan().any() else "infinity"
    return None


def _sketch(value: Tensor) -> NDArray[Any] | None:
    """Return (SKETCH, SKETCH) numbers of a matrix, half of its rows and columns from each half, at equal places.

    Their norm is 1, because a quantized matrix has another scale.
    """
    if value.ndim < 2:
        return None
    value = value.reshape(-1, value.shape[-1])
    index = []
    for size in value.shape:
        half = np.linspace(0, max(size // 2 - 1, 0), SKETCH // 2).astype(int)
        index.append(torch.from_numpy(np.concatenate([half, half + size // 2]).clip(max=size - 1)))
    numbers = np.asarray(value[index[0]][:, index[1]].double().numpy())
    norm = float(np.linalg.norm(numbers))
    return numbers / norm if 0 < norm < np.inf else numbers


# --- checks ---------------------------------------------------------------------------------------------------------
# A check yields its findings, and a fact that holds if it has none.


def _counts(checkpoint: Checkpoint, layers: Mapping[str, Sequence[Matrix]], expected: Expected) -> dict[str, int]:
    """Return the number of experts by layer: by the config, the expected tensors, or the highest id."""
    highest: dict[str, int] = defaultdict(int)
    for matrix in itertools.chain(find_matrices(expected).values(), *layers.values()):
        highest[matrix.layer] = max(highest[matrix.layer], 1 + max(matrix.places))
    count = count_experts(checkpoint.config)
    return {layer: count or highest[layer] for layer in layers}


def _check_complete(
    checkpoint: Checkpoint,
    layers: Mapping[str, Sequence[Matrix]],
    counts: Mapping[str, int],
    known: Mapping[str, Listed],
) -> Iterator[str | Finding]:
    forms = {form for matrices in layers.values() for form in _forms(matrices).values()}
    for layer, matrices in layers.items():
        count = counts[layer]
        for matrix in matrices:
            ids = checkpoint.ids.get(f"{layer}.{matrix.name}") or range(count)
            beyond = sorted(e for e, place in matrix.places.items() if e not in ids and place.tensor not in known)
            others = [expert for expert in _stored_otherwise(checkpoint, matrices, matrix.name, forms) if expert in ids]
            present = matrix.places.keys() | set(others)
            lacking = len(ids) - sum(expert in ids for expert in present)
            some = itertools.islice((expert for expert in ids if expert not in present), MOST_NAMED * MOST_NAMED)
            tensors = _tensors(matrix, matrix.places)
            if lacking:
                said = f"{matrix.name} of {lacking:,} of {len(ids):,} experts is missing: {_named(list(some), lacking)}"
                yield Finding("experts", f"{layer}: {said}", tensors)
            if beyond:
                said = f"{matrix.name} of experts beyond {len(ids):,}: {_named(beyond)}"
                yield Finding("experts", f"{layer}: {said}", tensors)
    if layers:
        counted = ", ".join(map(str, sorted(set(counts.values()))))
        yield f"{len(layers)} layers with {counted} experts, none missing"


def _check_missing(checkpoint: Checkpoint, expected: Expected) -> Iterator[str | Finding]:
    lacking = find_missing(checkpoint, expected)
    for place, said in by_layers(lacking, expected):
        yield Finding("missing", f"{place}: lacks {said}, which {expected.source}", [])
    yield f"no tensor is missing that {expected.source}"


def _forms(matrices: Sequence[Matrix]) -> dict[int, frozenset[str]]:
    """Return by expert the matrices that it has."""
    names: dict[int, list[str]] = defaultdict(list)
    for matrix in matrices:
        for expert in matrix.places:
            names[expert].append(matrix.name)
    return {expert: frozenset(of) for expert, of in names.items()}


def _stored_otherwise(
    checkpoint: Checkpoint, matrices: Sequence[Matrix], name: str, forms: Iterable[frozenset[str]]
) -> set[int]:
    """Return the experts without a tensor `name` that need none, because a quantization left them out, or only them.

    Tensors of a quantized matrix extend its name, as `w1.qweight` and `w1.scales` extend `w1.weight`, and
    `gate_up_proj_blocks` extends `gate_up_proj`.
    """
    found: set[int] = set()
    for other in matrices:
        is_part = extends(name, other.name)
        replaces = extends(other.name, name) and not any({name, other.name} <= form for form in forms)
        for expert, place in other.places.items() if is_part or replaces else ():
            dtype = checkpoint.tensors[place.tensor].dtype
            if _is_matrix(checkpoint, place) and (_is_integer(dtype) if replaces else dtype.lower() in UNQUANTIZED):
                found.add(expert)
    return found - {expert for matrix in matrices if matrix.name == name for expert in matrix.places}


def _is_matrix(checkpoint: Checkpoint, place: Place) -> bool:
    """Whether an expert has two or more dimensions of a tensor."""
    return len(checkpoint.tensors[place.tensor].shape) - (place.size == 1) > 1


def _is_integer(dtype: str) -> bool:
    return dtype.lower().startswith(("i", "u"))


def _check_routers(
    checkpoint: Checkpoint,
    layers: Mapping[str, Sequence[Matrix]],
    counts: Mapping[str, int],
    known: Mapping[str, Listed],
) -> Iterator[str | Finding]:
    found = [] if checkpoint.ids else find_routers(checkpoint, list(layers))  # else rows may be inactive
    routers = [each for each in found if not _is_integer(checkpoint.tensors[each[1]].dtype)]  # else they are packed
    for layer, tensor in routers:
        shape = checkpoint.tensors[tensor].shape
        if counts[layer] not in shape and (tensor not in known or known[tensor].shape != shape):
            yield Finding("router", f"{tensor}: has shape {shape} for {counts[layer]} experts", [tensor])
    if routers:
        yield f"{len(routers)} routers have a row for each expert"


def _check_types(checkpoint: Checkpoint, layers: Mapping[str, Sequence[Matrix]]) -> Iterator[str | Finding]:
    """Find experts with other types or shapes than the experts that have the same tensors, quantized or not."""
    for layer, matrices in layers.items():
        forms = _forms(matrices)
        for matrix, form in itertools.product(matrices, set(forms.values())):
            listed = {e: checkpoint.tensors[place.tensor] for e, place in matrix.places.items() if forms[e] == form}
            types = {expert: tensor.dtype for expert, tensor in listed.items()}
            # Vectors of bytes can be text, in which bitsandbytes keeps its settings.
            shapes = {
                e: t.shape for e, t in listed.items() if t.dtype.lower() not in ("u8", "uint8") or len(t.shape) > 1
            }
            for of, values in (("types", types), ("shapes", shapes)):
                if more := Counter(values.values()).most_common()[1:]:
                    odd = sorted(expert for expert, value in values.items() if value in {value for value, _ in more})
                    said = ", ".join(map(str, dict.fromkeys(values.values())))
                    message = f"{layer}: {matrix.name} has several {of}, {said}: {_named(odd)}"
                    yield Finding("types", message, _tensors(matrix, odd))
    if layers:
        yield "one type and shape for each matrix of a layer"


def _is_partly_zero(summary: Summary) -> bool:
    """Whether the values can be one rank's shard of the rows, and zeros; padding is less than half."""
    return summary.rows / 2 <= summary.zero_rows < summary.rows


def _check_values(
    checkpoint: Checkpoint, layers: Mapping[str, Sequence[Matrix]], others: Iterable[str], summaries: Summaries
) -> Iterator[str | Finding]:
    for name in sorted(others):
        summary = summaries[Place(name)]
        if summary.broken:
            yield Finding("values", f"{name}: has {summary.broken}", [name])
        if len(checkpoint.tensors[name].shape) > 1 and _is_partly_zero(summary):
            yield Finding("values", f"{name}: has {summary.zero_rows:,} of {summary.rows:,} rows zero", [name])
    for layer, matrices in layers.items():
        for matrix in matrices:
            of = {expert: summaries[place] for expert, place in matrix.places.items()}
            bad = {expert: summary.broken for expert, summary in of.items() if summary.broken}
            whole = {expert: summary for expert, summary in of.items() if _is_matrix(checkpoint, matrix.places[expert])}
            zero = [expert for expert, summary in whole.items() if summary.is_zero]
            partly = [expert for expert, summary in whole.items() if _is_partly_zero(summary)]
            if len(zero) == len(of):  # all may be, such as new adapters
                zero = []
            for experts, said in (
                (list(bad), f"has {' and '.join(sorted(set(bad.values())))}"),
                (zero, "is zero"),
                (partly, "has half or more of its rows zero"),
            ):
                if experts:
                    message = f"{layer}: {matrix.name} {said} in {_named(sorted(experts))}"
                    yield Finding("values", message, _tensors(matrix, experts))
    yield "no NaN, no infinity, no expert of zeros"


def _check_repeats(
    checkpoint: Checkpoint,
    layers: Mapping[str, Sequence[Matrix]],
    summaries: Summaries,
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
    summaries: Summaries,
) -> dict[tuple[str, int], list[bytes]]:
    """Return by layer and expert the digests of its matrices with their names, without vectors and constants."""
    digests: dict[tuple[str, int], list[bytes]] = defaultdict(list)
    for layer, matrices in layers.items():
        for matrix in sorted(matrices, key=lambda matrix: matrix.name):
            for expert, place in matrix.places.items():
                if _is_matrix(checkpoint, place) and not summaries[place].is_constant:
                    digests[layer, expert].append(matrix.name.encode() + summaries[place].digest)
    return digests


def _declared_copies(checkpoint: Checkpoint) -> str | None:
    """Return the file that declares a merged or upcycled model."""
    if any("upcycled" in key for key in checkpoint.config):
        return "config.json"
    return next((name for name in MERGES if (checkpoint.folder / name).exists()), None)


def _check_tied(checkpoint: Checkpoint, summaries: Summaries) -> Iterator[str | Finding]:
    heads = [name for name in checkpoint.tensors if name.endswith("lm_head.weight")]
    tables = [name for name in checkpoint.tensors if name.endswith(("embed_tokens.weight", "wte.weight"))]
    if not checkpoint.config.get("tie_word_embeddings") or len(heads) != 1 or len(tables) != 1:
        return
    if summaries[Place(heads[0])].digest == summaries[Place(tables[0])].digest:
        yield f"{heads[0]} equals {tables[0]}, to which config.json ties it"
    else:
        yield Finding("tied", f"{heads[0]} differs from {tables[0]}, to which config.json ties it", [*heads, *tables])


def _check_moments(checkpoint: Checkpoint) -> Iterator[str | Finding]:
    """Find states of an optimizer that do not fit their weight, or each other."""
    for weight, states in checkpoint.states.items():
        shape = checkpoint.tensors[weight].shape if weight in checkpoint.tensors else None
        if shape is None:
            yield Finding("moments", f"{weight}: has optimizer states and no weight", [weight])
            continue
        for state, listed in states.items():
            if len(listed.shape) == len(shape) > 0 and state in MOMENTS and listed.shape != shape:
                yield Finding("moments", f"{weight}: {state} has shape {listed.shape}, the weight {shape}", [weight])
        if all(state in states and states[state].shape == shape for state in MOMENTS) and shape:
            mean, square = (checkpoint.rows(weight, state, 0, shape[0]).double() for state in MOMENTS)
            if (square < 0).any() or (mean.abs() > MOMENT_BOUND * square.sqrt() + 1e-12).any():
                yield Finding("moments", f"{weight}: exp_avg and exp_avg_sq are not of the same gradients", [weight])
    if checkpoint.states:
        yield f"optimizer states of {len(checkpoint.states):,} weights fit them"


def _check_adapters(
    checkpoint: AdapterFiles, layers: Mapping[str, Sequence[Matrix]], summaries: Summaries
) -> Iterator[str | Finding]:
    """Find half pairs, other ranks, adapters that were never trained, and differences from the record at saving."""
    trained, zeros = False, []
    for layer, matrices in layers.items():
        for name, pair in _pairs(matrices).items():
            rank = checkpoint.settings.rank(f"{layer}.{name}")
            shared = [each for each in pair.values() if checkpoint.ids.get(f"{layer}.{each.name}")]
            experts = [set(pair[matrix].places if matrix in pair else ()) for matrix in ("lora_A", "lora_B")]
            halves = sorted(experts[0] ^ experts[1]) if not shared or len(pair) < 2 else []
            if halves:
                tensors = [tensor for each in pair.values() for tensor in _tensors(each, each.places.keys() & halves)]
                yield Finding("pairs", f"{layer}: {name} has lora_A or lora_B alone in {_named(halves)}", tensors)
            for matrix, each in pair.items():
                tensors = _tensors(each, each.places)
                side = -2 if matrix == "lora_A" else -1
                other = [tensor for tensor in tensors if checkpoint.tensors[tensor].shape[side:][:1] != (rank,)]
                if other and not checkpoint.has_patterns:
                    said = f"{layer}: {each.name} has another rank than {rank} of adapter_config.json"
                    yield Finding("pairs", said, other)
                if all(summaries[place].is_zero for place in each.places.values()):
                    zeros.append((f"{layer}: {each.name} is zero in every expert", tensors))
                else:
                    trained = trained or matrix == "lora_B"
    if layers and not trained:
        said = "lora_B is zero in every expert: they were frozen, or not in the optimizer"
        zeros = [(said, sorted({tensor for _, tensors in zeros for tensor in tensors}))]
    for said, tensors in zeros:
        yield Finding("values", said, tensors)
    for check, message in checkpoint.differences():
        yield Finding(check, message, [])
    if layers:
        ranks = "the ranks in adapter_config.json" if checkpoint.has_patterns else f"rank {checkpoint.settings.r}"
        recorded = ", as the ranks had them at saving" if checkpoint.has_record else ""
        yield f"each expert has lora_A and lora_B of {ranks}{recorded}"


def _pairs(matrices: Iterable[Matrix]) -> dict[str, dict[str, Matrix]]:
    """Return `lora_A` and `lora_B`, or the one that exists, by the name of the adapted matrix."""
    pairs: dict[str, dict[str, Matrix]] = defaultdict(dict)
    for matrix in sorted(matrices, key=lambda matrix: matrix.name):
        name, _, which = matrix.name.rpartition(".")
        if which in ("lora_A", "lora_B"):
            pairs[name][which] = matrix
    return pairs


def _check_base(
    checkpoint: AdapterFiles, layers: Mapping[str, Sequence[Matrix]], base: Checkpoint
) -> Iterator[str | Finding]:
    """Find adapters of layers and matrices that the base does not have, or of other sizes than its experts'."""
    _, linears = names_of_separate_experts(str(base.config.get("model_type")))
    parts = {linear: (parameter, len(of)) for parameter, of in linears.items() for linear in of}
    known: dict[tuple[str, str], set[tuple[int, ...]]] = {}
    """(outputs, inputs) by layer and parameter; in both orders if they are not of a linear layer, none if packed."""
    for matrix in find_matrices(base).values():
        name = matrix.name.removesuffix(".weight")
        parameter, count = parts.get(name, (name, 1))
        listed = base.tensors[next(iter(matrix.places.values())).tensor]
        sizes = known.setdefault((_number(matrix.layer), parameter), set())
        if len(size := listed.shape[-2:]) == 2 and "F" in listed.dtype.upper():
            sizes |= {(size[0] * count, size[1])} if name in parts else {size, size[::-1]}
    for layer, matrices in layers.items():
        of_layer = {parameter: sizes for (number, parameter), sizes in known.items() if number == _number(layer)}
        for name, pair in _pairs(matrices).items():
            parameter, count = parts.get(name, (name, 1))
            tensors = [_tensors(each, each.places) for each in pair.values()]
            said = None
            if not any(other.startswith(parameter) for other in of_layer):  # packed: gate_up_proj_blocks
                said = f"{name} is not a matrix of the base's experts"
            elif len(pair) == 2 and (fits := of_layer.get(parameter)):
                a, b = ({checkpoint.tensors[tensor].shape for tensor in each} for each in tensors)
                found = {(rows[-2], columns[-1]) for rows in b for columns in a if len(rows) > 1 < len(columns)}
                said = next(
                    (
                        f"{name} has {outputs} outputs and {inputs} inputs, which does not fit the base"
                        for outputs, inputs in sorted(found)
                        if (outputs * count, inputs) not in fits
                    ),
                    None,
                )
            if said:
                yield Finding("base", f"{layer}: {said}", sorted(set().union(*tensors)))
    if layers:
        yield f"{len(layers)} layers fit the base"


def _number(layer: str) -> str:
    """Return the number of a layer."""
    found = re.search(r"\.(\d+)\.", layer)
    return found[1] if found else layer


Matrices = Mapping[tuple[str, str], Matrix]
"""By layer and name."""


def _check_shapes(checkpoint: Checkpoint, matrices: Matrices, base: Checkpoint, of_base: Matrices) -> Iterator[Finding]:
    """Find matrices of another shape than in the base, unless integers are packed."""
    for (layer, name), theirs in of_base.items():
        ours = matrices[layer, name]
        shape, wanted = _shape(checkpoint, ours), _shape(base, theirs)
        if shape != wanted and not any(
            _is_integer(files.tensors[place.tensor].dtype)
            for files, matrix in ((checkpoint, ours), (base, theirs))
            for place in matrix.places.values()
        ):
            said = f"{layer}: {name} has shape {shape} in an expert, and {wanted} in the base"
            yield Finding("base", said, _tensors(ours, ours.places))


def _check_order(
    layers: Mapping[str, Sequence[Matrix]], summaries: Summaries, of_base: Matrices, base: Summaries
) -> Iterator[str | Finding]:
    """Find experts that are nearer to another expert of the base, and gates that are nearer to its other half."""
    compared = 0
    for layer, matrices in layers.items():
        pairs: dict[int, list[tuple[NDArray[Any], NDArray[Any]]]] = defaultdict(list)
        for matrix in matrices:
            ours, theirs = _sketches(matrix, summaries), _sketches(of_base.get((layer, matrix.name)), base)
            for expert in ours.keys() & theirs.keys():
                pairs[expert].append((ours[expert], theirs[expert]))
        experts = sorted(pairs)
        if not experts:
            continue
        compared += 1
        x_ED, y_ED = (np.stack([np.ravel([pair[side] for pair in pairs[e]]) for e in experts]) for side in (0, 1))
        distance_EE = np.linalg.norm(x_ED[:, None] - y_ED[None], axis=-1)
        own_E, nearest_E = distance_EE.diagonal(), distance_EE.argmin(1)
        moved = [i for i in range(len(experts)) if distance_EE[i, nearest_E[i]] < NEAR * own_E[i]]
        alien = [experts[i] for i in range(len(experts)) if distance_EE[i].min() > FAR * np.linalg.norm(y_ED[i])]
        if alien:
            yield Finding("order", f"{layer}: {_named(alien)} are like no expert of the base", [])
        if moved:
            said = ", ".join(f"{experts[i]} is {experts[nearest_E[i]]}" for i in moved[:MOST_NAMED])
            more = f" and {len(moved) - MOST_NAMED} more" if len(moved) > MOST_NAMED else ""
            yield Finding("order", f"{layer}: experts are in another order than in the base: {said}{more}", [])
            continue
        if swapped := _swapped_halves(matrices, summaries, of_base, base):
            yield Finding("halves", f"{layer}: gate and up are swapped in {_named(swapped)}", [])
    if compared:
        yield f"experts, gates and ups of {compared} layers are in the order of the base"


def _sketches(matrix: Matrix | None, summaries: Summaries) -> dict[int, NDArray[Any]]:
    """Return the sketches of a matrix by expert; none without a matrix."""
    found = {} if matrix is None else {expert: summaries[place].sketch for expert, place in matrix.places.items()}
    return {expert: sketch for expert, sketch in found.items() if sketch is not None}


def _swapped_halves(matrices: Sequence[Matrix], summaries: Summaries, of_base: Matrices, base: Summaries) -> list[int]:
    """Return the experts whose gate is nearer to the base's up than to its gate."""
    swapped: set[int] = set()
    for matrix in matrices:
        ours, theirs = _sketches(matrix, summaries), _sketches(of_base.get((matrix.layer, matrix.name)), base)
        if "gate_up" in matrix.name or "w13" in matrix.name:
            swaps = [{e: np.roll(sketch, SKETCH // 2, axis) for e, sketch in theirs.items()} for axis in (0, 1)]
        elif (up := GATE_UP.get(matrix.name)) in {other.name for other in matrices}:
            swaps = [_sketches(of_base.get((matrix.layer, up)), base)]
        else:
            continue
        for of_swap in swaps:
            for expert in ours.keys() & theirs.keys() & of_swap.keys():
                own, other = (np.linalg.norm(ours[expert] - of[expert]) for of in (theirs, of_swap))
                if other < NEAR * own:
                    swapped.add(expert)
    return sorted(swapped)


def _tensors(matrix: Matrix, experts: Iterable[int]) -> list[str]:
    return sorted({matrix.places[expert].tensor for expert in experts})


def _named(experts: Sequence[int], count: int | None = None) -> str:
    """Return "expert(s) 1, 2, 5-7", with "and more" if there are more than these."""
    said = runs(experts)
    return f"expert(s) {said}{' and more' if (count or 0) > len(experts) and not said.endswith('more') else ''}"
