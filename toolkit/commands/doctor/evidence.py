"""One run as a whole, joined from the records of its ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from toolkit.commands.doctor.record import Record
from toolkit.experts.parallel.ownership import EMPTY_ROW

Key = tuple[str, int]
"""A parameter and the id of one of its rows; `WHOLE` for a parameter that is not stacked by expert."""
WHOLE = -1


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
        """All tensors of one kind after `phase` steps, from their owning ranks; parameters in `split` row by row."""
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
        """The kinds of tensors that an optimizer keeps."""
        found = {key.split("/")[1] for key in self.first.tensors if key.startswith(f"{phase}/")}
        return found - {"weight", "gradient", "output"}

    def unequal_replicated(self, phase: int) -> list[str]:
        """Replicated parameters, and replicas of experts, whose bits differ between ranks."""
        differing = self._unequal_digests(lambda record: record.phases[phase].digests)
        return differing + self._unequal_rows(phase, "weight", of_owners=False)

    def unequal_gradients(self, step: int) -> list[str]:
        """The same for gradients that are averaged over ranks, before clipping."""
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
        """Whether the placement after `phase` steps is not that of one step before."""
        pairs = [(r.phases[phase - 1].rows, r.phases[phase].rows) for r in self.records if phase > 0]
        return any(before[name] != after[name] for before, after in pairs for name in before.keys() & after.keys())

    def unfrozen(self, phase: int) -> set[str]:
        """Parameters that are trainable after `phase` steps, and were not before the first."""
        first = self.first.phases[0]
        now = self.first.phases[phase]
        return (now.rows.keys() | now.digests.keys()) - (first.rows.keys() | first.digests.keys())

    # --- numbers ----------------------------------------------------------------------------------------------

    def samples(self, step: int) -> Counter[str]:
        return Counter(d for record in self.records for batch in record.steps[step].samples for d in batch)

    def have_equal_samples(self, step: int) -> bool:
        """Whether every rank was given what the first was."""
        return all(record.steps[step].samples == self.first.steps[step].samples for record in self.records)

    def loss(self, step: int) -> float:
        """Mean over ranks and micro-batches of what went backward."""
        return _mean([loss for record in self.records for loss in record.steps[step].losses])

    def balance_loss(self, step: int) -> float | None:
        """The router losses: ours are shares that add up over ranks, those of transformers are means."""
        if self.first.steps[step].penalties:
            return sum(sum(r.steps[step].penalties) for r in self.records) / len(self.first.steps[step].penalties)
        losses = [value for record in self.records for value in record.steps[step].balance_losses]
        return _mean(losses) if losses else None

    def counts(self, step: int) -> dict[str, list[int]]:
        layers = self.first.steps[step].counts
        return {
            name: [sum(n) for n in zip(*(r.steps[step].counts[name] for r in self.records), strict=True)]
            for name in layers
        }

    def norms(self, step: int) -> list[float]:
        """What clipping returned, by rank."""
        return [norm for record in self.records if (norm := record.steps[step].norm) is not None]

    def outputs(self, module: str) -> dict[str, Tensor]:
        """Fingerprints of a module's first output, by sample and the size that it was padded to."""
        found: dict[str, Tensor] = {}
        for record in self.records:
            tensor = record.tensors.get(f"0/output/{module}")
            if tensor is not None and record.steps:
                for sample, row in zip(record.steps[0].samples[0], tensor, strict=True):
                    found[f"{sample} {row[-1]:.0f}"] = row[:-1]
        return found

    def gathered(self, attribute: str) -> list[str]:
        """The names in a list that each rank has, each once."""
        return list(dict.fromkeys(name for record in self.records for name in getattr(record, attribute)))


def _mean(values: list[float]) -> float:
    return sum(values) / max(1, len(values))
