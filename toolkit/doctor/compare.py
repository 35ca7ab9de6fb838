"""Distance of two runs, each joined from the records of its ranks, by quantity and step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from toolkit.doctor.record import SEEN, Record
from toolkit.experts.placement.placement import EMPTY_ROW

Key = tuple[str, int]
"""A parameter and a row id; `WHOLE` for a parameter that is not stacked by expert."""
WHOLE = -1
Distance = tuple[float, str]
"""A relative difference, and the place of it."""

TOLERANCES = {"no": 1e-6, "bf16": 5e-2, "fp16": 2e-2}
"""Relative effect of rounding in a few steps of float32, and of mixed precision."""
GRADIENT_FLOOR = 0.1
"""A gradient is compared with the larger of its own norm and this part of the norm of all gradients: a sum that cancels
has the rounding errors of its terms."""
NOISE = 1e-5
"""Weights are not compared after a step if their gradients differ and are below this part of the root mean square of
all gradients: an optimizer that divides by the gradient's size amplifies rounding errors to full steps."""

ROUNDING_MARGIN = 10.0
"""Allowed distance, in multiples of the distance of runs that differ by rounding: kernels also round inside a module,
and sum in parts whose number depends on the batch size."""


@dataclass(frozen=True)
class Check:
    """One line of the report."""

    quantity: str
    worst: float
    """Largest relative difference; 0 or infinity for equality checks."""
    limit: float
    step: int = 0
    """The first step, counted from 1, that exceeds the limit, else the step with the largest difference; 0 is before
    the first."""
    place: str = ""
    """The parameter or layer with the largest difference at that step."""

    @property
    def ok(self) -> bool:
        return self.worst <= self.limit


def relative(value: float, truth: float) -> float:
    if math.isnan(value) or math.isnan(truth):
        return 0.0 if math.isnan(value) and math.isnan(truth) else math.inf
    return abs(value - truth) / max(abs(truth), 1e-30) if value != truth else 0.0


def apart(value: Tensor, truth: Tensor, floor: float = 0.0) -> float:
    """Return the 2-norm of the difference over max(norm of `truth`, `floor`); infinite if shapes differ."""
    if value.shape != truth.shape:
        return math.inf
    difference = torch.linalg.vector_norm(value.double() - truth.double()).item()
    if not difference:
        return 0.0
    ratio = difference / max(torch.linalg.vector_norm(truth.double()).item(), floor, 1e-30)
    return math.inf if math.isnan(ratio) else ratio


def worst_of(values: Mapping[Key, Tensor], truths: Mapping[Key, Tensor], floor: float = 0.0) -> tuple[float, str]:
    """Return the largest relative difference and its parameter; a tensor that one side lacks is zeros."""
    worst, place = 0.0, ""
    for key in truths.keys() | values.keys():
        one = truths[key] if key in truths else torch.zeros_like(values[key])
        many = values[key] if key in values else torch.zeros_like(one)
        distance = apart(many, one, floor)
        if distance > worst:
            worst = distance
            place = label(key)
    return worst, place


def label(key: Key) -> str:
    name, expert = key
    return name if expert < 0 else f"{name} of expert {expert}"


@dataclass
class Evidence:
    """Quantities of one run, over all of its ranks."""

    records: list[Record]

    @cached_property
    def first(self) -> Record:
        return self.records[0]

    @property
    def steps(self) -> int:
        return min(len(record.steps) for record in self.records)

    @cached_property
    def stacked(self) -> set[str]:
        """Parameters whose rows are experts."""
        return {name for phase in self.first.phases for name in phase.rows}

    # --- tensors by id ----------------------------------------------------------------------------------------

    def tensors(self, phase: int, kind: str, split: set[str]) -> dict[Key, Tensor]:
        """Return all tensors of one kind after `phase` steps, from their owning ranks; parameters in `split` by row."""
        found: dict[Key, Tensor] = {}
        for record in self.records:
            rows = record.phases[phase].rows
            owns = record.phases[phase].owns
            prefix = f"{phase}/{kind}/"
            for key, tensor in record.tensors.items():
                if not key.startswith(prefix):
                    continue
                name = key.removeprefix(prefix)
                if name not in split or not tensor.ndim:
                    found.setdefault((name, WHOLE), tensor)
                    continue
                ids = rows.get(name, list(range(len(tensor))))
                for row, (expert, mine) in enumerate(zip(ids, owns.get(name, [True] * len(ids)), strict=True)):
                    if expert != EMPTY_ROW and mine:
                        found.setdefault((name, expert), tensor[row])
        return found

    def kinds(self, phase: int) -> set[str]:
        """Return the kinds of tensors in the optimizer state."""
        found = {key.split("/")[1] for key in self.first.tensors if key.startswith(f"{phase}/")}
        return found - {"weight", "gradient", "output"}

    def unequal_replicated(self, phase: int) -> list[str]:
        """Return replicated parameters, and replicas of experts, that differ between ranks."""
        differing = self._unequal_digests(lambda record: record.phases[phase].digests)
        return differing + self._unequal_rows(phase, "weight", of_owners=False)

    def unequal_gradients(self, step: int) -> list[str]:
        """Return the same for gradients that are averaged over ranks, before clipping."""
        differing = self._unequal_digests(lambda record: record.steps[step].gradients)
        return differing + self._unequal_rows(step, "gradient", of_owners=True)

    def _unequal_digests(self, of: Callable[[Record], Mapping[str, str]]) -> list[str]:
        return [
            name for name, bits in of(self.first).items() if any(of(r).get(name, bits) != bits for r in self.records)
        ]

    def _unequal_rows(self, phase: int, kind: str, *, of_owners: bool) -> list[str]:
        seen: dict[Key, Tensor] = {}
        differing: dict[str, None] = {}
        for record in self.records:
            for name, ids in record.phases[phase].rows.items():
                tensor = record.tensors.get(f"{phase}/{kind}/{name}")
                if tensor is None:
                    continue
                for row, expert in enumerate(ids):
                    if expert == EMPTY_ROW or (of_owners and not record.phases[phase].owns[name][row]):
                        continue
                    if not torch.equal(seen.setdefault((name, expert), tensor[row]), tensor[row]):
                        differing[f"{name} of expert {expert}"] = None
        return list(differing)

    def has_moved(self, phase: int) -> bool:
        """Return whether step `phase` changed the placement."""
        pairs = [(r.phases[phase - 1].rows, r.phases[phase].rows) for r in self.records if phase > 0]
        return any(before[name] != after[name] for before, after in pairs for name in before.keys() & after.keys())

    def unfrozen(self, phase: int) -> set[str]:
        """Return the parameters that are trainable after `phase` steps, and were not before the first."""
        first = self.first.phases[0]
        now = self.first.phases[phase]
        return (now.rows.keys() | now.digests.keys()) - (first.rows.keys() | first.digests.keys())

    # --- numbers ----------------------------------------------------------------------------------------------

    def samples(self, step: int) -> Counter[str]:
        return Counter(d for record in self.records for batch in record.steps[step].samples for d in batch)

    def loss(self, step: int) -> float:
        """Return the mean loss over ranks and micro-batches."""
        return _mean([loss for record in self.records for loss in record.steps[step].losses])

    def balance_loss(self, step: int) -> float | None:
        """Return the router loss: a sum over ranks for `RouterPenalty`, a mean for transformers."""
        if self.first.steps[step].penalties:
            return sum(sum(r.steps[step].penalties) for r in self.records) / len(self.first.steps[step].penalties)
        losses = [value for record in self.records for value in record.steps[step].balance_losses]
        return _mean(losses) if losses else None

    def counts(self, step: int) -> dict[Key, Tensor]:
        """Return the pairs per expert of each layer, over ranks."""
        layers = self.first.steps[step].counts
        return {
            (name, WHOLE): torch.tensor([r.steps[step].counts[name] for r in self.records]).sum(0) for name in layers
        }

    def norms(self, step: int) -> list[float]:
        """Return the norms from clipping, by rank."""
        return [norm for record in self.records if (norm := record.steps[step].norm) is not None]

    def outputs(self, step: int, module: str) -> dict[str, Tensor]:
        """Return fingerprints of a module's outputs in a step, by sample and padded size."""
        found: dict[str, Tensor] = {}
        for record in self.records:
            for number, samples in enumerate(record.steps[step].samples):
                tensor = record.tensors.get(f"{step}/output/{number}/{module}")
                if tensor is not None:
                    rows = zip(samples, tensor, strict=True)
                    found |= {f"{sample} {row[-1]:.0f}": row[:-1] for sample, row in rows}
        return found


def _mean(values: list[float]) -> float:
    return sum(values) / max(1, len(values))


@dataclass
class Comparison:
    """`many` processes against `one`."""

    one: Evidence
    many: Evidence
    tolerance: float
    rounding: Comparison | None = None
    """One process against itself with other rounding: these distances are tolerated."""

    def __post_init__(self) -> None:
        self.distances: dict[tuple[str, int], float] = {}
        """The distance of each quantity at each step."""
        self.steps = min(self.one.steps, self.many.steps)
        self.phases = min(len(r.phases) for r in (*self.one.records, *self.many.records))
        self.split = self.one.stacked | self.many.stacked
        self.checks = list(self._checks())

    def __getitem__(self, quantity: str) -> Check:
        """Return the check of `quantity`, or a passing one if there is nothing to check."""
        return next((check for check in self.checks if check.quantity == quantity), Check(quantity, 0.0, 0.0))

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    def _checks(self) -> Iterable[Check]:
        many, tolerance = self.many, self.tolerance
        yield self._over("initial weights", 0, self._weights, range(1), first=0)
        yield self._over("samples", 0, self._samples)
        if self.one.first.steps[0].counts:
            # With coarse rounding of hidden states, a token between two experts can go to either.
            yield self._over("expert counts", 0 if tolerance < 1e-4 else tolerance, self._counts)
        if self.one.balance_loss(0) is not None:
            yield self._over("balance loss", tolerance, self._balance)
        yield self._over("loss", tolerance, lambda step: (relative(many.loss(step), self.one.loss(step)), ""))
        yield self._over("gradients", tolerance, self._gradients)
        if self.one.norms(0):
            yield self._over("gradient norm", tolerance, self._norm)
        yield self._over("learning rate", tolerance, self._rates)
        yield self._over("weights", tolerance, self._weights, range(1, self.phases), first=0)
        yield self._over("optimizer state", tolerance, self._state, range(1, self.phases), first=0)
        phases = range(self.phases)
        yield self._over("replicas on ranks", 0, lambda phase: _any(many.unequal_replicated(phase)), phases, first=0)
        records = [*self.one.records, *many.records]
        for quantity in SEEN:
            yield _found(quantity, [name for record in records for name in record.seen[quantity]])
        if any(record.saved_by for record in many.records):
            errors = [record.save_error for record in many.records if record.save_error]
            yield _found("save and load", errors[:1] or [name for record in many.records for name in record.lost])

    def _over(
        self, quantity: str, tolerance: float, at: Callable[[int], Distance], over: range | None = None, first: int = 1
    ) -> Check:
        """Return the first step beyond its limit, else the largest distance. `first` is the name of step 0."""
        checks = [Check(quantity, 0.0, tolerance)]
        for index in range(self.steps) if over is None else over:
            distance, place = at(index)
            self.distances[quantity, index] = distance
            rounded = 0.0 if self.rounding is None else self.rounding.distances.get((quantity, index), 0.0)
            checks.append(Check(quantity, distance, max(tolerance, ROUNDING_MARGIN * rounded), index + first, place))
        beyond = [check for check in checks if not check.ok]
        return beyond[0] if beyond else max(checks, key=lambda check: check.worst)

    # --- one quantity at one step -----------------------------------------------------------------------------

    def _samples(self, step: int) -> Distance:
        one = self.one.samples(step)
        many = self.many.samples(step)
        missing = (one - many).total() + (many - one).total()
        return missing / max(1, one.total() + many.total()), f"{one.total()} in one process, {many.total()} in several"

    def _counts(self, step: int) -> Distance:
        return worst_of(self.many.counts(step), self.one.counts(step))

    def _balance(self, step: int) -> Distance:
        one, many = self.one.balance_loss(step), self.many.balance_loss(step)
        return (relative(many, one), "") if one is not None and many is not None else (math.inf, "")

    def _gradients(self, step: int) -> Distance:
        one = self.one.tensors(step, "gradient", self.split)
        return worst_of(self.many.tensors(step, "gradient", self.split), one, GRADIENT_FLOOR * _norm(one.values()))

    def _norm(self, step: int) -> Distance:
        truth = self.one.norms(step)
        return max(((relative(norm, truth[0]), f"rank {r}") for r, norm in enumerate(self.many.norms(step))))

    def _rates(self, step: int) -> Distance:
        rates = [zip(r.steps[step].rates, self.one.first.steps[step].rates, strict=False) for r in self.many.records]
        return max((relative(many, one) for pairs in rates for many, one in pairs), default=0.0), ""

    def _weights(self, phase: int) -> Distance:
        one, many = (run.tensors(phase, "weight", self.split) for run in (self.one, self.many))
        for key, noise in self._noise(phase).items():
            if key in many and many[key].shape == noise.shape:
                many[key] = many[key].where(~noise, one[key])
        return worst_of(many, one)

    def _noise(self, phase: int) -> dict[Key, Tensor]:
        """Return masks of weights that follow rounding errors of gradients in `phase` steps."""
        noise: dict[Key, Tensor] = {}
        for step in range(phase):
            one, many = (run.tensors(step, "gradient", self.split) for run in (self.one, self.many))
            elements = sum(tensor.numel() for tensor in one.values())
            floor = NOISE * _norm(one.values()) / max(1, elements) ** 0.5
            for key in one.keys() & many.keys():
                if one[key].shape != many[key].shape:
                    continue
                small = (one[key].abs() < floor) & (many[key].abs() < floor) & (one[key] != many[key])
                noise[key] = noise[key] | small if key in noise else small
        return noise

    def _state(self, phase: int) -> Distance:
        worst: Distance = (0.0, "")
        for kind in sorted(self.one.kinds(phase) | self.many.kinds(phase)):
            one = self.one.tensors(phase, kind, self.split)
            # The second moment is a square: its floor is squared, its relative error doubles.
            power = 2 if "sq" in kind else 1
            total = _norm(value for value in one.values() if value.ndim) or 1.0
            distance, place = worst_of(self.many.tensors(phase, kind, self.split), one, total * GRADIENT_FLOOR**power)
            if distance / power > worst[0]:
                worst = distance / power, f"{kind} of {place}"
        return worst


def _norm(tensors: Iterable[Tensor]) -> float:
    return math.sqrt(sum(tensor.double().square().sum().item() for tensor in tensors))


def _any(names: list[str]) -> Distance:
    return (math.inf, ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")) if names else (0.0, "")


def _found(quantity: str, names: list[str]) -> Check:
    """Return a check that fails if `names` is not empty."""
    distance, place = _any(list(dict.fromkeys(names)))
    return Check(quantity, distance, 0.0, 0, place)
