"""The size of micro-batches that a run's folder notes after a step ran out of memory."""

from __future__ import annotations

import json
from pathlib import Path

import toolkit as tk
from toolkit.run.run import Run
from toolkit.train.batch_size import CHOICE_FILE, accumulation_steps, shrink, shrunk


def started(folder: Path) -> Run:
    return tk.start_run("small", tk.RunConfig(run_dir=folder, tracker="none", cpu=True, batch_size=24))


def test_a_run_that_ran_out_of_memory_continues_with_the_next_smaller_size_that_divides(tmp_path: Path):
    with started(tmp_path) as run:
        assert accumulation_steps(run) == 1
        assert [shrink(run, pieces) for pieces in (1, 3, 8, 24)] == [12, 4, 1, None]
        assert shrink(run, 3) == 4
        assert shrunk(run, 3) == 4
        assert shrunk(run, 6) is None
    with started(tmp_path) as run:
        assert accumulation_steps(run) == 6
        assert run.accelerator.gradient_accumulation_steps == 6
    saved = json.loads((tmp_path / CHOICE_FILE).read_text())
    assert saved == {"world_size": 1, "micro_batch_size": 4, "out_of_memory_with": 8}


def test_a_run_on_another_number_of_processes_begins_with_the_size_of_its_config(tmp_path: Path):
    with started(tmp_path) as run:
        shrink(run, 1)
    (tmp_path / CHOICE_FILE).write_text('{"world_size": 2, "micro_batch_size": 6, "out_of_memory_with": 12}')
    with started(tmp_path) as run:
        assert accumulation_steps(run) == 1
