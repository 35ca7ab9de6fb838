"""Optuna search over the axes of a sweep: the sampler chooses the next cells from earlier results."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from toolkit.commands.sweep.cells import CellRunner, Outcome
from toolkit.commands.sweep.grid import make_cell
from toolkit.errors import UserError


def search(
    runner: CellRunner,
    axes: Mapping[str, Sequence[str]],
    *,
    trials: int,
    metric: str,
    minimise: bool,
    seed: int,
    journal: Path,
    log: Callable[[str], None],
) -> Outcome:
    """Run up to `trials` distinct cells, including earlier cells in `journal`, with `runner.jobs` in parallel. All
    cells have the seed `seed`.

    Raises UserError if Optuna is missing, or if runs do not have `metric`.
    """
    try:
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend
    except ImportError:
        raise UserError("--search: Optuna is missing. Run pip install 'moe-toolkit[search]'.") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        study_name="sweep",
        storage=JournalStorage(JournalFileBackend(str(journal))),
        direction="minimize" if minimise else "maximize",
        load_if_exists=True,
    )
    choices: dict[str, optuna.distributions.BaseDistribution] = {
        name: optuna.distributions.CategoricalDistribution(values) for name, values in axes.items()
    }
    grid = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    tried = [trial.params for trial in study.trials if trial.state.is_finished()]

    def ask() -> optuna.trial.Trial:
        number = len(study.trials)
        study.sampler = optuna.samplers.TPESampler(seed=seed + number)  # a continued search draws different numbers
        trial = study.ask(choices)
        if trial.params in tried:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
            study.enqueue_trial(random.Random(seed + number).choice([each for each in grid if each not in tried]))
            trial = study.ask(choices)
        tried.append(trial.params)
        return trial

    total = Outcome()
    distinct = sum(values in tried for values in grid)
    while (left := min(trials, len(grid)) - distinct) > 0 and not (total.stopped or total.elsewhere):
        asked = [ask() for _ in range(min(runner.jobs, left))]
        distinct += len(asked)
        cells = [make_cell(runner.recipe, trial.params | {"seed": str(seed)}) for trial in asked]
        outcome = runner.run(cells)
        total.done += outcome.done
        total.failed += outcome.failed
        total.elsewhere += outcome.elsewhere
        total.stopped |= outcome.stopped
        for trial, cell in zip(asked, cells, strict=True):
            results = runner.results(cell) or {}
            if cell in outcome.failed or (metric in results and results[metric] is None):  # NaN is null in JSON
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
            elif metric in results:
                study.tell(trial, results[metric])
            elif cell in outcome.done:
                raise UserError(f"--metric {metric}: the runs have no such number. See results.json of one of them.")
    done = [trial for trial in study.trials if trial.state == optuna.trial.TrialState.COMPLETE]
    if done:
        best = study.best_trial
        log(f"best of {len(done)}: {metric} {best.value:g} with {best.params}")
    return total
