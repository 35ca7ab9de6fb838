"""Each case equals a plain loop of one process: losses, norms, gradients, weights and optimizer states.

On GPUs (`make test-gpu`), each process has its own, or all share one: see `tests.support.gpu`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.support.processes import run_distributed
from tests.parity.case import CASES, Case
from tests.parity.loops import train, train_reference
from tests.parity.models import EXPERTS
from tests.parity.outcome import Outcome, assert_equals
from tests.parity.page import LIST, PAGE, case_list, page
from tests.support.gpu import use_gpu

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 0.05}
ON_GPU = [case for case in CASES if case.loop in ("ExpertParallel", "Trainer") and case.ranks.dense == "ddp"]
"""Cases that also run on GPUs; gloo, which shares a GPU, lacks the reduce-scatter of FSDP2."""


def train_all(cases: list[Case], folder: Path, device: str) -> list[Outcome]:
    """Train the cases of a world. The first error ends the launch, because ranks are out of step then."""
    if device == "gpu":
        use_gpu()
    found = []
    for number, case in enumerate(cases):
        try:
            found.append(train(case, folder / str(number)))
        except Exception as error:
            raise RuntimeError(str(case)) from error
    return found


class Runs:
    """The outcome of each rank by case. The first case of a world launches all of them."""

    def __init__(self, folder: Path, device: str):
        self.folder, self.device = folder, device
        self.found: dict[Case, list[Outcome]] = {}
        self.references: dict[Case, Outcome] = {}

    def __getitem__(self, case: Case) -> list[Outcome]:
        if case not in self.found:
            world = case.ranks.world
            known = CASES if self.device == "cpu" else ON_GPU
            cases = [other for other in known if other.ranks.world == world]
            ranks = run_distributed(train_all, world, cases, self.folder / str(world), self.device)
            self.found |= {each: list(found) for each, *found in zip(cases, *ranks, strict=True)}
        return self.found[case]

    def reference(self, case: Case) -> Outcome:
        if case.reference not in self.references:
            self.references[case.reference] = train_reference(case.reference)
        return self.references[case.reference]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("parity"), "cpu")


@pytest.fixture(scope="module")
def gpu_runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("parity"), "gpu")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_case_equals_one_process(case: Case, runs: Runs) -> None:
    compare(case, runs[case], runs.reference(case))


@pytest.mark.gpu
@pytest.mark.parametrize("case", ON_GPU, ids=str)
def test_case_on_gpus_equals_one_process_on_a_cpu(case: Case, gpu_runs: Runs) -> None:
    compare(case, gpu_runs[case], gpu_runs.reference(case))


def compare(case: Case, ranks: list[Outcome], expected: Outcome) -> None:
    if case.dtype is torch.bfloat16:  # a token between two experts may go to either, in all steps but the first
        ranks, expected = [_of_first_step(rank) for rank in ranks], _of_first_step(expected)
    assert_equals(ranks, expected, TOLERANCE[case.dtype])
    if case.ranks.planner is not None:
        assert ranks[0].moved > 0, "no expert migrated"
    if case.ranks.ep_size > 1:
        assert min(count for rank in ranks for count in rank.experts_here) < EXPERTS


def _of_first_step(outcome: Outcome) -> Outcome:
    return replace(outcome, gradients=outcome.gradients[:1], loads=[], states={})


def test_page_of_tested_combinations_is_up_to_date() -> None:
    assert PAGE.read_text() == page()
    assert LIST.read_text() == case_list()
