"""The checks of an MoE checkpoint for missing, repeated, reordered, empty or broken tensors."""

from __future__ import annotations

import itertools
import math
import re
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from toolkit.audit.checkpoint import Checkpoint
from toolkit.audit.expected import (
    IN_LAYER,
    UNQUANTIZED,
    Expected,
    by_layers,
    collapsed,
    count_layers,
    extends,
    find_expected,
    find_missing,
)
from toolkit.audit.experts import Matrix, Place, count_experts, find_matrices, find_routers, is_integer, is_matrix
from toolkit.audit.findings import MOST_NAMED, Finding, named, runs
from toolkit.audit.order import SCALE, Matrices, check_order, compare
from toolkit.audit.tensors import MEGATRON, AdapterFiles, named_base, open_checkpoint
from toolkit.audit.values import PADDED, Summaries, summarize, summary
from toolkit.errors import UserError
from toolkit.integrations.transformers.compat import names_of_separate_experts
from toolkit.progress_bar import progress

OUTLIER, OTHER_LAYERS = math.log(16), math.log(100)
"""Least logarithms of a norm's ratio to the median that make it an outlier among experts and among layers."""
SPREADS = 8.0
"""Least distance of an outlier, in robust standard deviations."""
SATURATED = 0.1
"""Share of elements at the limit that unsaturated values do not have."""
WRAPPED = re.compile(
    r"^module\.|(^|\.)(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.|^base_model\.model\.base_model\."
)
"""Names in wrapped models, which nothing loads."""
MERGES = ("mergekit_config.yml", "mergekit_moe_config.yml")
MOMENTS = "exp_avg", "exp_avg_sq"
MOMENT_BOUND = 23.0
"""Adam's moments have |m| <= c sqrt(v), by the Cauchy-Schwarz inequality, with c = (1 - b1) / sqrt((1 - b2) (1 - b1^2 /
b2)): 7.3 for betas of 0.9 and 0.999, 22.9 for 0.9 and 0.9999."""


@dataclass
class Audit:
    """The result of an audit: facts that were checked, and findings."""

    path: str
    facts: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)


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
    if wrapped := [name for name in checkpoint.tensors if WRAPPED.search(name)]:
        said = f"{len(wrapped):,} names have a wrapper's prefix, such as {wrapped[0]}. Save the unwrapped model"
        found.findings.append(Finding("files", said, wrapped))
    if not checkpoint.tensors:
        found.findings.append(Finding("files", "has no weights, so nothing was checked", []))
        return found
    against = against or named_base(checkpoint)
    base = None if against is None else open_checkpoint(against)
    if base is not None and (isinstance(checkpoint, AdapterFiles) or not checkpoint.config):
        checkpoint.config = base.config
    matrices = find_matrices(checkpoint)
    layers: dict[str, list[Matrix]] = defaultdict(list)
    for matrix in matrices.values():
        layers[matrix.layer].append(matrix)
    if not layers and isinstance(checkpoint, AdapterFiles) and not checkpoint.settings.parameters_of_experts:
        found.facts.append("adapters of other modules than experts")
        if unread := _unread_targets(checkpoint):
            said = f"no module has adapters of {', '.join(unread)}, which adapter_config.json names"
            found.findings.append(Finding("missing", said, []))
    elif not layers:
        names = [name for name in checkpoint.tensors if "linear_fc" in name]
        megatron = f": {names[0]} is a name of Megatron-LM. Write safetensors files with {MEGATRON}" if names else ""
        found.findings.append(Finding("experts", f"no tensor is an expert's{megatron}", []))
    places = {place for matrix in matrices.values() for place in matrix.places.values()}
    experts = {place.tensor for place in places}
    others = checkpoint.tensors.keys() - experts
    summaries = summarize(checkpoint, places, sketches=against is not None)
    summaries |= {Place(name): summary(checkpoint.parts(name)) for name in progress(others, "reading other tensors")}
    expected = find_expected(checkpoint, base, experts)
    found_routers = [] if checkpoint.ids else find_routers(checkpoint, list(layers))  # else rows may be inactive
    routers = {layer: name for layer, name in found_routers if not is_integer(checkpoint.tensors[name].dtype)}
    counts = _counts(checkpoint, layers, routers, expected)
    shapes = {name: each.shape for name, each in expected.tensors.items()}
    known = {name for name, each in checkpoint.tensors.items() if shapes.get(name) == each.shape}
    digests = _digests(checkpoint, layers, summaries)
    checks: list[Iterator[str | Finding]] = [
        _check_complete(checkpoint, layers, counts, known),
        _check_routers(checkpoint, routers, counts, digests, base, known),
        _check_types(checkpoint, layers),
        _check_values(checkpoint, layers, others, summaries, base),
        iter(()) if isinstance(checkpoint, AdapterFiles) else _check_norms(checkpoint, layers, others, summaries),
        _check_repeats(checkpoint, layers, routers, digests),
        _check_tied(checkpoint, summaries),
        _check_moments(checkpoint),
    ]
    if isinstance(checkpoint, AdapterFiles):
        checks.append(_check_adapters(checkpoint, layers, summaries))
        if base is not None:
            checks += [_describe_adapted(layers, base), _check_base(checkpoint, layers, base)]
    else:
        checks.append(_check_missing(checkpoint, expected, others - set(routers.values())))
    if base is not None and not isinstance(checkpoint, AdapterFiles):
        of_base = {key: matrix for key, matrix in find_matrices(base).items() if key in matrices}
        cut = list(_check_shapes(checkpoint, matrices, base, of_base))
        of_base = {key: m for key, m in of_base.items() if _shape(base, m) == _shape(checkpoint, matrices[key])}
        if layers and not of_base and not cut:
            raise UserError(
                f"against={str(against)!r}: has no experts of the same names and shapes. Give the same format and "
                "family."
            )
        common = {place for matrix in of_base.values() for place in matrix.places.values()}
        of_common = summarize(base, common, sketches=True)
        checks += [iter(cut), check_order(layers, checkpoint, summaries, of_base, base, of_common)]
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


def _unread_targets(checkpoint: AdapterFiles) -> list[str]:
    """Return the listed modules without adapters."""
    targets = checkpoint.settings.target_modules
    modules = {f".{name.rpartition('.lora_')[0]}" for name in checkpoint.tensors}
    listed = targets if isinstance(targets, list) else []
    return [target for target in listed if not any(module.endswith(f".{target}") for module in modules)]


def _shape(checkpoint: Checkpoint, matrix: Matrix) -> tuple[int, ...]:
    """Return the shape of one expert's matrix."""
    place = next(iter(matrix.places.values()))
    shape = checkpoint.tensors[place.tensor].shape
    return shape if place.size is None else (place.size, *shape[1:])


# --- checks ---------------------------------------------------------------------------------------------------------
# A check yields its findings, and a fact that holds if it has none.


def _counts(
    checkpoint: Checkpoint, layers: Mapping[str, Sequence[Matrix]], routers: Mapping[str, str], expected: Expected
) -> dict[str, int]:
    """Return the number of experts by layer: by the config, the expected tensors, or the highest id.

    A layer may have fewer than the config says if its router has a row for each, and another layer has all of them.
    """
    highest: dict[str, int] = defaultdict(int)
    for matrix in itertools.chain(find_matrices(expected).values(), *layers.values()):
        highest[matrix.layer] = max(highest[matrix.layer], 1 + max(matrix.places))
    if not (count := count_experts(checkpoint.config)):
        return {layer: highest[layer] for layer in layers}
    own = {layer: 1 + max(expert for matrix in layers[layer] for expert in matrix.places) for layer in layers}
    pruned = {
        layer
        for layer, router in routers.items()
        if count in own.values()
        and own[layer] < count not in (shape := checkpoint.tensors[router].shape)
        and own[layer] in shape
    }
    return {layer: own[layer] if layer in pruned else count for layer in layers}


def _check_complete(
    checkpoint: Checkpoint,
    layers: Mapping[str, Sequence[Matrix]],
    counts: Mapping[str, int],
    known: Set[str],
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
                said = f"{matrix.name} of {lacking:,} of {len(ids):,} experts is missing: {named(list(some), lacking)}"
                yield Finding("experts", f"{layer}: {said}", tensors)
            if beyond:
                said = f"{matrix.name} of experts beyond {len(ids):,}: {named(beyond)}"
                yield Finding("experts", f"{layer}: {said}", tensors)
    if layers:
        counted = ", ".join(map(str, sorted(set(counts.values()))))
        yield f"{len(layers)} layers with {counted} experts, none missing"


def _check_missing(checkpoint: Checkpoint, expected: Expected, others: Set[str]) -> Iterator[str | Finding]:
    lacking = find_missing(checkpoint, expected)
    for place, said in by_layers(lacking, expected):
        yield Finding("missing", f"{place}: lacks {said}, which {expected.source}", [])
    empty = [name for name, each in checkpoint.tensors.items() if 0 in each.shape]
    if empty:
        said = f"{len(empty)} tensors have no values, as ZeRO-3 leaves them, such as {empty[0]}. Save gathered weights"
        yield Finding("missing", said, empty)
    for name in sorted(others & expected.tensors.keys()) if expected.source.startswith("transformers") else ():
        listed, wanted = checkpoint.tensors[name], expected.tensors[name].shape
        if listed.dtype.lower() in UNQUANTIZED and listed.shape != wanted and name not in empty:
            yield Finding("types", f"{name}: has shape {listed.shape}, {expected.source} {wanted}", [name])
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
            if is_matrix(checkpoint, place) and (is_integer(dtype) if replaces else dtype.lower() in UNQUANTIZED):
                found.add(expert)
    return found - {expert for matrix in matrices if matrix.name == name for expert in matrix.places}


def _check_routers(
    checkpoint: Checkpoint,
    routers: Mapping[str, str],
    counts: Mapping[str, int],
    digests: Mapping[tuple[str, int], list[bytes]],
    base: Checkpoint | None,
    known: Set[str],
) -> Iterator[str | Finding]:
    """Find routers without a row for each expert, with zero or repeated rows, or with other rows than in the base."""
    for layer, tensor in routers.items():
        shape = checkpoint.tensors[tensor].shape
        if counts[layer] not in shape and tensor not in known:
            yield Finding("router", f"{tensor}: has shape {shape} for {counts[layer]} experts", [tensor])
            continue
        x_EH = _router_rows(checkpoint, tensor, counts[layer])
        first: dict[bytes, int] = {}
        origins = {expert: first.setdefault(row.tobytes(), expert) for expert, row in enumerate(x_EH)}
        copies = [e for e, origin in origins.items() if digests.get((layer, e)) != digests.get((layer, origin))]
        if zero := [expert for expert in range(len(x_EH)) if not x_EH[expert].any()]:
            if len(zero) < len(x_EH) or copies:
                yield Finding("router", f"{tensor}: is zero in the rows of {named(zero)}", [tensor])
        elif copies:
            said = f"rows of {named(copies)} repeat those of {named([origins[expert] for expert in copies])}"
            yield Finding("router", f"{tensor}: {said}", [tensor])
        if base is None or tensor not in base.tensors or base.tensors[tensor].shape != shape:
            continue
        y_EH = _router_rows(base, tensor, counts[layer])
        moved, alien = compare(x_EH, y_EH)
        if moved:
            said = ", ".join(f"{ours} is {theirs}" for ours, theirs in list(moved.items())[:MOST_NAMED])
            yield Finding("router", f"{tensor}: rows are in another order than in the base: {said}", [tensor])
        elif alien := sorted({*alien} - {*zero}):
            yield Finding("router", f"{tensor}: rows of {named(alien)} are like none of the base", [tensor])
        elif not 1 / SCALE < (ratio := float(np.linalg.norm(x_EH) / np.linalg.norm(y_EH))) < SCALE and not zero:
            yield Finding("scale", f"{tensor}: has {ratio:.3g} times the norm of the base", [tensor])
    if routers:
        yield f"{len(routers)} routers have a row for each expert"


def _router_rows(checkpoint: Checkpoint, tensor: str, count: int) -> NDArray[Any]:
    """Return the weight of a router with a row for each expert."""
    shape = checkpoint.tensors[tensor].shape
    value: NDArray[Any] = checkpoint.rows(tensor, None, 0, shape[0]).double().numpy()
    return value if shape[0] == count or count not in shape else value.T.copy()


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
                    message = f"{layer}: {matrix.name} has several {of}, {said}: {named(odd)}"
                    yield Finding("types", message, _tensors(matrix, odd))
    if layers:
        yield "one type and shape for each matrix of a layer"


def _check_values(
    checkpoint: Checkpoint,
    layers: Mapping[str, Sequence[Matrix]],
    others: Iterable[str],
    summaries: Summaries,
    base: Checkpoint | None,
) -> Iterator[str | Finding]:
    def differs(name: str) -> bool:
        """Whether the base has a tensor of this name that is not zero."""
        return base is not None and name in base.tensors and not summary(base.parts(name)).is_zero

    for name in sorted(others):
        of_name = summaries[Place(name)]
        if of_name.broken:
            yield Finding("values", f"{name}: has {of_name.broken}", [name])
        if of_name.is_zero and differs(name):
            yield Finding("values", f"{name}: is zero, and not in the base", [name])
        if len(checkpoint.tensors[name].shape) > 1 and 1 > of_name.zero_rows >= PADDED:
            yield Finding("values", f"{name}: has {of_name.zero_rows:.0%} of its rows zero", [name])
    for layer, matrices in layers.items():
        for matrix in matrices:
            of = {expert: summaries[place] for expert, place in matrix.places.items()}
            bad = {expert: summary.broken for expert, summary in of.items() if summary.broken}
            whole = {expert: summary for expert, summary in of.items() if is_matrix(checkpoint, matrix.places[expert])}
            zero = [expert for expert, summary in whole.items() if summary.is_zero]
            partly = [expert for expert, summary in whole.items() if summary.is_partly_zero]
            constant = [expert for expert, summary in whole.items() if summary.is_constant and summary.norm]
            usual = statistics.median(summary.at_limit for summary in of.values())
            limit = [e for e, of_e in whole.items() if of_e.at_limit > SATURATED > 5 * usual and not of_e.is_constant]
            if len(zero) == len(of) and not any(map(differs, _tensors(matrix, zero))):  # such as new adapters
                zero = []
            for experts, said in (
                (list(bad), f"has {' and '.join(sorted(set(bad.values())))}"),
                (zero, "is zero"),
                (partly, "has a quarter or more of its rows or columns zero"),
                (constant if len(constant) < len(of) else [], "is constant"),
                (limit, "is saturated"),
            ):
                if experts:
                    message = f"{layer}: {matrix.name} {said} in {named(sorted(experts))}"
                    yield Finding("values", message, _tensors(matrix, experts))
    yield "no NaN, no infinity, no expert of zeros"


def _check_norms(
    checkpoint: Checkpoint, layers: Mapping[str, Sequence[Matrix]], others: Iterable[str], summaries: Summaries
) -> Iterator[str | Finding]:
    """Find experts whose norms are far from those of their layer, and tensors far from those of other layers."""
    of_kind: dict[str, dict[tuple[str, str], float]] = defaultdict(dict)
    for name in others:
        place = Place(name)
        if len(checkpoint.tensors[name].shape) > 1 and (logs := _logs(checkpoint, {0: place}, summaries)):
            of_kind[re.sub(r"\d+", "*", name)][name, ""] = logs[0]
    for layer, matrices in layers.items():
        for matrix in matrices:
            if logs := _logs(checkpoint, matrix.places, summaries):
                kind = re.sub(r"\d+", "*", f"{layer}.{matrix.name}")
                of_kind[kind][layer, matrix.name] = statistics.median(logs.values())
            if far := _outliers(logs, OUTLIER):
                said = f"{layer}: {matrix.name} has a norm far from other experts' in {named(sorted(far))}"
                yield Finding("scale", said, _tensors(matrix, far))
    for of in of_kind.values():
        for layer, name in _outliers(of, OTHER_LAYERS):
            yield Finding(
                "scale", f"{layer}: {name or 'it'} has a norm far from other layers'", [] if name else [layer]
            )
    yield "no norm is far from those of other experts and layers"


def _logs(checkpoint: Checkpoint, places: Mapping[int, Place], summaries: Summaries) -> dict[int, float]:
    """Return the logarithm of the norm by expert, of matrices that are not quantized, zero or broken."""
    return {
        expert: math.log(max(summaries[place].norm or 0, sys.float_info.min))
        for expert, place in places.items()
        if summaries[place].norm is not None
        and is_matrix(checkpoint, place)
        and not (summaries[place].is_constant or summaries[place].broken)
    }


Key = TypeVar("Key")


def _outliers(logs: Mapping[Key, float], least: float) -> list[Key]:
    """Return the keys of values far from the median; none of fewer than four."""
    if len(logs) < 4:
        return []
    center = statistics.median(logs.values())
    spread = 1.4826 * statistics.median(abs(value - center) for value in logs.values())
    return [key for key, value in logs.items() if abs(value - center) > max(least, SPREADS * spread)]


def _check_repeats(
    checkpoint: Checkpoint,
    layers: Mapping[str, Sequence[Matrix]],
    routers: Mapping[str, str],
    digests: Mapping[tuple[str, int], list[bytes]],
) -> Iterator[str | Finding]:
    """Find experts with the bytes of another expert of their layer, or of another layer.

    Facts are: equality of all experts of each layer, as after upcycling, a model that is declared to be merged, copies
    with the same rows in the router, as after upcycling by groups, and layers for multi-token prediction.
    """
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
    if all({layer for layer, _ in origins} == {key[0]} for key, origins in repeated.items()) and all(
        _have_same_rows(checkpoint, routers.get(layer), expert, origins[0][1])
        for (layer, expert), origins in repeated.items()
    ):
        yield "experts repeat others with their rows of the router, as after upcycling by groups"
        return
    depth = count_layers(checkpoint.config)
    copies: dict[tuple[str, str, str], dict[int, int]] = defaultdict(dict)
    for (layer, expert), origins in repeated.items():
        other, original = next(origin for origin in origins if origin != (layer, expert))
        if layer != other and any(_predicts_more(each, depth) for each in (layer, other)):
            continue
        kind = "repeats" if len(set(origins)) == 1 else "repeats a matrix of"
        copies[layer, kind, other][expert] = original
    if not copies:
        yield "layers for multi-token prediction repeat experts, as they are initialized"
    for (layer, kind, other), pairs in copies.items():
        place = "of the same layer" if layer == other else f"of {other}"
        yield Finding(
            "repeats",
            f"{layer}: {named(sorted(pairs))} {kind} {named([pairs[e] for e in sorted(pairs)])} {place}",
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
                if is_matrix(checkpoint, place) and not summaries[place].is_constant:
                    digests[layer, expert].append(matrix.name.encode() + summaries[place].digest)
    return digests


def _predicts_more(layer: str, depth: int | None) -> bool:
    """Whether a layer is for multi-token prediction, which begins as the last layer."""
    number = _number(layer)
    return ".mtp." in f".{layer}" or (depth is not None and number.isdigit() and int(number) >= depth)


def _have_same_rows(checkpoint: Checkpoint, router: str | None, *experts: int) -> bool:
    if router is None:
        return False
    one, other = (checkpoint.rows(router, None, expert, expert + 1) for expert in experts)
    return bool((one == other).all())


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
    kinds: dict[tuple[str, str], dict[int, str]] = defaultdict(dict)
    for name in map(collapsed, checkpoint.tensors):
        if match := IN_LAYER.match(name):
            kinds[match["stack"], match["rest"]][int(match["number"])] = name
    trained = set(map(collapsed, checkpoint.states))
    in_layers = {(match["stack"], int(match["number"])) for name in trained if (match := IN_LAYER.match(name))}
    for (stack, _), names in kinds.items():
        lacking = [name for number, name in names.items() if (stack, number) in in_layers and name not in trained]
        if len(lacking) <= len(trained & set(names.values())):
            for name in lacking:
                yield Finding("moments", f"{name}: has no optimizer states, unlike in other layers", [name])
    if checkpoint.states:
        yield f"optimizer states of {len(checkpoint.states):,} weights fit them"


def _check_adapters(
    checkpoint: AdapterFiles, layers: Mapping[str, Sequence[Matrix]], summaries: Summaries
) -> Iterator[str | Finding]:
    """Find half pairs, other ranks, adapters that were never trained, and differences from the record at saving."""
    trained, zeros = False, []
    for layer, matrices in layers.items():
        for name, pair in _pairs(matrices).items():
            rank = checkpoint.rank(f"{layer}.{name}")
            shared = [each for each in pair.values() if checkpoint.ids.get(f"{layer}.{each.name}")]
            experts = [set(pair[matrix].places if matrix in pair else ()) for matrix in ("lora_A", "lora_B")]
            halves = sorted(experts[0] ^ experts[1]) if not shared or len(pair) < 2 else []
            if halves:
                tensors = [tensor for each in pair.values() for tensor in _tensors(each, each.places.keys() & halves)]
                yield Finding("pairs", f"{layer}: {name} has lora_A or lora_B alone in {named(halves)}", tensors)
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
    if layers and not any(map(_pairs, layers.values())):
        first = next(iter(layers.values()))[0]
        unread = _tensors(first, first.places)
        yield Finding("files", f"{checkpoint.keys[unread[0]]} is not of a known layout, so it is not loaded", unread)
    elif layers and not trained:
        said = "lora_B is zero in every expert: they were frozen, or not in the optimizer"
        zeros = [(said, sorted({tensor for _, tensors in zeros for tensor in tensors}))]
    for said, tensors in zeros:
        yield Finding("values", said, tensors)
    for check, message in checkpoint.differences():
        yield Finding(check, message, [])
    if checkpoint.order is None:
        yield "the order of experts in lora_B is not checked, because its values do not show it"
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
    if not layers:
        return
    settings = checkpoint.settings
    adapted = {name for matrices in layers.values() for name in _pairs(matrices)}
    named_linears = parts.keys() & set(settings.target_modules or ()) if adapted & parts.keys() else set()
    if unread := sorted((settings.parameters_of_experts | named_linears) - adapted):
        yield Finding("missing", f"no layer has adapters of {', '.join(unread)}, which adapter_config.json names", [])
    depth = count_layers(base.config) or sys.maxsize  # layers after these are for multi-token prediction
    numbers = {int(number) for number, _ in known if number not in set(map(_number, layers)) and number.isdigit()}
    if (lacking := sorted(number for number in numbers if number < depth)) and not settings.is_of_some_layers:
        said = f"layer(s) {runs(lacking)}: have no adapters of experts, and the base has experts there"
        yield Finding("missing", said, [])
    yield f"{len(layers)} layers fit the base"


def _describe_adapted(layers: Mapping[str, Sequence[Matrix]], base: Checkpoint) -> Iterator[str]:
    """Say which matrices of the base's experts have adapters, unless the base is packed in integers."""
    _, linears = names_of_separate_experts(str(base.config.get("model_type")))
    parameter_of = {linear: parameter for parameter, of in linears.items() for linear in of}
    adapted = {(_number(layer), name) for layer, matrices in layers.items() for name in _pairs(matrices)}
    depth, elements, with_adapters = count_layers(base.config), Counter[str](), Counter[str]()
    of_base = [m for m in find_matrices(base).values() if not _predicts_more(m.layer, depth)]
    for matrix in of_base:
        listed = [base.tensors[place.tensor] for place in matrix.places.values()]
        if any(is_integer(each.dtype) for each in listed):
            return
        is_part = any(extends(matrix.name, other.name) for other in of_base if other.layer == matrix.layer)
        if is_part or not is_matrix(base, next(iter(matrix.places.values()))):
            continue
        name = matrix.name.removesuffix(".weight")
        count = len(matrix.places) * math.prod(_shape(base, matrix))
        elements[name] += count
        if any(
            (_number(matrix.layer), each) in adapted for each in (name, parameter_of.get(name), *linears.get(name, ()))
        ):
            with_adapters[name] += count
    if elements:
        said = f"adapters of {len(with_adapters)} of {len(elements)} matrices of experts"
        if with_adapters:
            share = with_adapters.total() / elements.total()
            said += f": {', '.join(sorted(with_adapters))} ({share:.0%} of expert weights)"
        lacking = sorted(elements.keys() - with_adapters.keys())
        yield said + (f", none of {', '.join(lacking)}" if lacking else "")


def _number(layer: str) -> str:
    """Return the number of a layer."""
    found = re.search(r"\.(\d+)\.", layer)
    return found[1] if found else layer


def _check_shapes(checkpoint: Checkpoint, matrices: Matrices, base: Checkpoint, of_base: Matrices) -> Iterator[Finding]:
    """Find matrices of another shape than in the base, unless integers are packed."""
    for (layer, name), theirs in of_base.items():
        ours = matrices[layer, name]
        shape, wanted = _shape(checkpoint, ours), _shape(base, theirs)
        if shape != wanted and not any(
            is_integer(files.tensors[place.tensor].dtype)
            for files, matrix in ((checkpoint, ours), (base, theirs))
            for place in matrix.places.values()
        ):
            said = f"{layer}: {name} has shape {shape} in an expert, and {wanted} in the base"
            yield Finding("base", said, _tensors(ours, ours.places))


def _tensors(matrix: Matrix, experts: Iterable[int]) -> list[str]:
    return sorted({matrix.places[expert].tensor for expert in experts})
