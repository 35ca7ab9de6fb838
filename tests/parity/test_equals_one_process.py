"""Each case equals a plain loop of one process: losses, norms, gradients, weights and optimizer states."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.support.processes import run_distributed
from tests.parity.case import CASES, Case
from tests.parity.doors import train, train_reference
from tests.parity.models import EXPERTS
from tests.parity.outcome import Outcome, assert_equals

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 0.05}


def train_all(cases: list[Case], folder: Path) -> list[Outcome]:
    """Train the cases of a world. The first one that raises ends the launch, because its ranks are out of step."""
    found = []
    for number, case in enumerate(cases):
        try:
            found.append(train(case, folder / str(number)))
        except Exception as error:
            raise RuntimeError(str(case)) from error
    return found


class Runs:
    """The outcome of each rank by case. The first case of a world launches all of them."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.found: dict[Case, list[Outcome]] = {}
        self.references: dict[Case, Outcome] = {}

    def __getitem__(self, case: Case) -> list[Outcome]:
        if case not in self.found:
            world = case.ranks.world
            cases = [other for other in CASES if other.ranks.world == world]
            ranks = run_distributed(train_all, world, cases, self.folder / str(world))
            self.found |= {each: list(found) for each, *found in zip(cases, *ranks, strict=True)}
        return self.found[case]

    def reference(self, case: Case) -> Outcome:
        if case.reference not in self.references:
            self.references[case.reference] = train_reference(case.reference)
        return self.references[case.reference]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("parity"))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_case_equals_one_process(case: Case, runs: Runs) -> None:
    ranks, expected = runs[case], runs.reference(case)
    if case.dtype is torch.bfloat16:  # a token between two experts may go to either, in all steps but the first
        ranks, expected = [_of_first_step(rank) for rank in ranks], _of_first_step(expected)
    assert_equals(ranks, expected, TOLERANCE[case.dtype])
    if case.ranks.planner is not None:
        assert ranks[0].moved > 0, "no expert migrated"
    if case.ranks.ep_size > 1:
        assert min(count for rank in ranks for count in rank.experts_here) < EXPERTS


def _of_first_step(outcome: Outcome) -> Outcome:
    return replace(outcome, gradients=outcome.gradients[:1], states={})
