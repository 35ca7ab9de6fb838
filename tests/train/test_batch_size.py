"""Automatic batch size: which sizes are tried, what is measured, and that a run does not notice."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import toolkit as tk
from tests.support.helpers import run_distributed
from toolkit.data.table import TensorTable
from toolkit.train import batch_size
from toolkit.train.batch_size import (
    CHOICE_FILE,
    TrialSteps,
    accumulation_steps,
    memory_budget,
    shrink,
    shrunk,
    try_sizes,
)
from toolkit.train.callbacks.expert_load import ExpertLoad
from toolkit.train.optim import build_optimizer

MEBI = 2**20
MEMORY = SimpleNamespace(rss=100 * MEBI)


def fitting(peaks: dict[int, int], budget: int) -> int | None:
    return max((size for size, peak in peaks.items() if peak <= budget), default=None)


@given(st.integers(1, 200), st.integers(1, 1000), st.integers(0, 200), st.integers(1, 200_000))
def test_the_largest_size_that_fits_is_found_and_none_far_above_is_tried(batch, fixed, each, budget):
    sizes = [d for d in range(1, batch + 1) if batch % d == 0]
    peaks = try_sizes(sizes, lambda size: fixed + each * size, budget)
    assert fitting(peaks, budget) == max((s for s in sizes if fixed + each * s <= budget), default=None)
    # Before there are two sizes there is no line to go by; with it nothing is tried in vain.
    assert sum(peak > budget for peak in peaks.values()) <= 1
    assert [*peaks] == sorted(peaks)


def test_where_the_line_proves_wrong_what_lies_below_is_tried():
    curve = {1: 10, 2: 11, 4: 12, 8: 30, 16: 100}
    peaks = try_sizes([1, 2, 4, 8, 16], curve.__getitem__, 40)
    assert (fitting(peaks, 40), 16 in peaks) == (8, False)
    jump = {1: 10, 2: 11, 3: 90, 4: 95, 6: 99, 12: 100}
    assert fitting(try_sizes([1, 2, 3, 4, 6, 12], jump.__getitem__, 40), 40) == 2


def test_sizes_below_one_that_was_refused_are_tried():
    curve = {1: 10, 2: 11, 3: 12, 4: 13, 6: sys.maxsize, 8: sys.maxsize}
    assert fitting(try_sizes([*curve], curve.__getitem__, 40), 40) == 4


def test_no_size_fits_a_budget_below_the_model():
    assert try_sizes([1, 2, 4], lambda size: 100 + size, 50) == {1: 101}


class Wide(nn.Module):
    """Keeps three MiB of activations per sample, or more."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)
        self.stem = nn.Linear(4, 2**18)
        self.head = nn.Linear(2**18, 2)
        self.seen = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += len(x)
        return self.head(self.dropout(self.stem(x).sin()))


class Config(tk.RunConfig):
    pass


def config(folder, **settings) -> Config:
    return Config(run_dir=folder, tracker="none", cpu=True, auto_batch_size=True, **settings)


def table() -> TensorTable:
    draws = torch.Generator().manual_seed(0)
    return TensorTable(input=torch.randn(40, 4, generator=draws), label=torch.arange(40) % 2)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return build_optimizer(model, lr=1e-3, config=tk.OptimizerOptions())


def test_trial_steps_measure_activations_and_leave_no_trace(tmp_path):
    with tk.start_run("small", config(tmp_path)) as run:
        model = Wide()
        weights, state = [p.clone() for p in model.parameters()], torch.get_rng_state()
        trial = TrialSteps(run, tk.Classification(), model, table(), optimizer)
        # Stem, sine and dropout keep a MiB each. There is no upper bound: a run keeps freed memory, and a hole that is
        # too small for the next tensor comes on top; 7 to 16 MiB per sample were seen.
        peaks = [min(trial.peak_bytes(size) for _ in range(2)) for size in (1, 64)]
        assert peaks[1] - peaks[0] > 63 * 2 * MEBI
        assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
        assert (model.seen, torch.equal(torch.get_rng_state(), state)) == (0, True)
        assert all(p.grad is None for p in model.parameters())
        trial.close()


def test_the_budget_is_a_fraction_of_what_the_machine_can_give():
    whole, half = (memory_budget(torch.device("cpu"), fraction) for fraction in (1.0, 0.5))
    assert 0 < half < whole < sys.maxsize


def test_the_budget_keeps_below_the_limits_of_the_group_and_of_the_process(monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(batch_size, "memory_limit_bytes", lambda: 600 * MEBI)
    monkeypatch.setattr(batch_size, "mappable_bytes", lambda: None)
    assert memory_budget(cpu, 0.5) == 150 * MEBI
    monkeypatch.setattr(batch_size, "memory_limit_bytes", lambda: None)
    monkeypatch.setattr(batch_size, "mappable_bytes", lambda: 10 * MEBI)
    monkeypatch.setattr(batch_size.psutil, "Process", lambda: SimpleNamespace(memory_info=lambda: MEMORY))
    assert memory_budget(cpu, 0.5) == (100 + 5) * MEBI


def test_processes_of_a_launcher_that_does_not_count_those_of_a_node_share_its_memory(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(batch_size, "memory_limit_bytes", lambda: 600 * MEBI)
    monkeypatch.setattr(batch_size, "mappable_bytes", lambda: None)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda _=None: 2)
    assert memory_budget(torch.device("cpu"), 0.5) == 150 * MEBI


def choose(folder, monkeypatch, limit: int, **settings) -> int:
    """With a made-up memory in which a micro-batch of `limit` samples just fits."""
    monkeypatch.setattr(TrialSteps, "peak_bytes", lambda _, size: 100 * size)
    monkeypatch.setattr(batch_size, "memory_budget", lambda _, fraction: int(100 * limit * fraction))
    with tk.start_run("small", config(folder, batch_size=24, **settings)) as run:
        model = nn.Linear(4, 2)
        steps = accumulation_steps(run, tk.Classification(), model, table(), optimizer)
        assert run.accelerator.gradient_accumulation_steps == steps
        return steps


def test_the_global_batch_stays_and_is_cut_into_as_few_pieces_as_fit(tmp_path, monkeypatch):
    # 24 samples, and room for ten: pieces of 8. With a quarter of that, pieces of 2.
    assert choose(tmp_path / "a", monkeypatch, 10, memory_fraction=1.0) == 3
    assert choose(tmp_path / "b", monkeypatch, 10, memory_fraction=0.25) == 12
    assert choose(tmp_path / "c", monkeypatch, 1000, gradient_accumulation_steps=4) == 1


def test_a_run_that_continues_keeps_what_it_chose(tmp_path, monkeypatch):
    assert choose(tmp_path, monkeypatch, 10) == 3
    assert choose(tmp_path, monkeypatch, 3) == 3
    saved = json.loads((tmp_path / CHOICE_FILE).read_text())
    assert (saved["micro_batch_size"], saved["peak_bytes"]["8"]) == (8, 800)


def test_a_run_that_ran_out_of_memory_continues_with_the_next_smaller_size(tmp_path, monkeypatch):
    assert choose(tmp_path, monkeypatch, 10) == 3
    with tk.start_run("small", config(tmp_path, batch_size=24)) as run:
        assert [shrink(run, pieces) for pieces in (1, 3, 8, 24)] == [12, 4, 1, None]
        assert shrink(run, 3) == 4
        assert shrunk(run, 3) == 4
        assert shrunk(run, 6) is None
    assert choose(tmp_path, monkeypatch, 10) == 6
    saved = json.loads((tmp_path / CHOICE_FILE).read_text())
    assert (saved["micro_batch_size"], saved["out_of_memory_with"], saved["peak_bytes"]["8"]) == (4, 8, 800)


def test_memory_for_less_than_one_sample_is_an_error_of_one_sentence(tmp_path, monkeypatch):
    with pytest.raises(tk.UserError, match="one sample per process needs"):
        choose(tmp_path, monkeypatch, 0)


class Greedy(tk.Classification):
    """A task for which more than five samples take all memory that there is."""

    def loss(self, model, batch):
        if len(batch["input"]) > 5:
            torch.empty(2**50)
        return super().loss(model, batch)


def test_a_size_that_the_allocator_of_a_cpu_refuses_is_too_large(tmp_path):
    with tk.start_run("small", config(tmp_path, batch_size=24)) as run:
        assert accumulation_steps(run, Greedy(), nn.Linear(4, 2), table(), optimizer) == 24 // 4


def ranks_disagree(folder) -> int:
    """Rank 1 has a third of rank 0's memory; the layer's experts are spread over both."""
    with tk.start_run("small", config(folder, batch_size=24)) as run:
        batch_size.memory_budget = lambda *_: 1000 - 700 * run.rank
        measured = TrialSteps.peak_bytes
        TrialSteps.peak_bytes = lambda self, size: 0 * measured(self, size) + 100 * size
        groups = tk.experts.make_expert_groups(2)
        model = nn.Sequential(nn.Linear(4, 6), tk.experts.make_moe(6, 4, 4, 2, groups=groups), nn.Linear(6, 2))
        task = tk.Classification(penalty=tk.experts.RouterPenalty(model, balance_weight=0.1))
        load = ExpertLoad(model)
        steps = accumulation_steps(run, task, model, table(), optimizer)
        assert len(load.forwards) == 0
        assert int(model[1].load_E.sum()) == 0
        return steps


def test_ranks_agree_on_what_the_poorest_can_do(tmp_path):
    assert run_distributed(ranks_disagree, 2, tmp_path) == [4, 4]
