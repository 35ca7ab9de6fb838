"""Optuna over the axes of a sweep: its sampler chooses the next cell by what the others gave."""

from __future__ import annotations

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
    """Run `trials` cells in all, counting those in `journal` from earlier calls; cells with one seed, `seed`.

    Raises UserError where Optuna is missing, or runs have no such metric.
    """
    try:
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend
    except ImportError:
        raise UserError("--search needs Optuna, which is missing: pip install 'moe-toolkit[search]'.") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        study_name="sweep",
        storage=JournalStorage(JournalFileBackend(str(journal))),
        sampler=optuna.samplers.TPESampler(seed=seed),
        direction="minimize" if minimise else "maximize",
        load_if_exists=True,
    )
    total = Outcome()
    finished = [trial for trial in study.trials if trial.state.is_finished()]
    for _ in range(len(finished), trials):
        trial = study.ask()
        values = {name: trial.suggest_categorical(name, list(choices)) for name, choices in axes.items()}
        cell = make_cell(runner.recipe, values | {"seed": str(seed)})
        outcome = runner.run([cell])
        total.done += outcome.done
        total.failed += outcome.failed
        if outcome.stopped or outcome.elsewhere:
            total.stopped, total.elsewhere = outcome.stopped, outcome.elsewhere
            return total
        results = runner.results(cell) or {}
        value = results.get(metric)
        if outcome.failed or (metric in results and value is None):  # JSON has no NaN
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
        elif not isinstance(value, (int, float)):
            raise UserError(f"--metric {metric}: the runs have no such number: see results.json of one of them.")
        else:
            study.tell(trial, value)
    if any(trial.state == optuna.trial.TrialState.COMPLETE for trial in study.trials):
        best = study.best_trial
        log(f"best of {len(study.trials)}: {metric} {best.value:g} with {best.params}")
    return total
