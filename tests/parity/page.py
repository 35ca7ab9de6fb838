"""The page of tested combinations: `python -m tests.parity.page` writes it, and prints the list of cases."""

from __future__ import annotations

import csv
import io
import sys

from benchmarks.support.processes import ROOT
from tests.parity.case import CASES, LOOPS, UNSUPPORTED, Case, supported_pairs
from tests.parity.layouts import LAYOUTS, MORE_LAYOUTS
from tests.parity.models import MODELS
from tests.parity.optimizers import OPTIMIZERS

PAGE = ROOT / "docs" / "project" / "parity.md"
LIST = PAGE.with_suffix(".csv")
HABITS = ("accumulation", "non-reentrant checkpointing", "reentrant checkpointing", "clipping", "frozen", "groups")
HABITS += ("scheduler", "evaluation", "penalty", "resume")


def count(**values: str) -> str:
    """Return the number of cases with these values of their fields, or with a habit."""
    habit = values.pop("habit", None)
    found = [case for case in CASES if all(getattr(case, name) == value for name, value in values.items())]
    return str(sum(habit is None or habit in case.habits for case in found))


def table(first: str, rows: dict[str, str], columns: dict[str, str]) -> str:
    """Return the numbers of cases; `rows` and `columns` give the field of each value."""
    head = f"| {first} | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}\n"
    cells = (
        f"| {row} | {' | '.join(count(**{rows[row]: row, columns[column]: column}) for column in columns)} |"
        for row in rows
    )
    return head + "\n".join(cells)


def page() -> str:
    layouts = dict.fromkeys([*LAYOUTS, *MORE_LAYOUTS], "layout")
    loops = dict.fromkeys(LOOPS, "loop")
    others = dict.fromkeys(MODELS, "model") | dict.fromkeys(OPTIMIZERS, "optimizer") | dict.fromkeys(HABITS, "habit")
    reasons = "\n".join(f"- {reason}" for reason, _, _ in UNSUPPORTED)
    pairs = sum(1 for _ in supported_pairs())
    return f"""# Tested combinations

`make test` trains {len(CASES)} [cases](parity.csv) in float64 and compares losses, gradient norms, gradients, weights
and optimizer states with a plain torch loop of one process, to 1e-10. They cover all {pairs:,} supported pairs of
models, loops, layouts, optimizers and habits. `python -m tests.parity.page` writes this page from
`tests/parity/case.py`. The tables have numbers of cases.

{table("layout", layouts, loops)}

{table("model, optimizer, habit", others, loops)}

Not supported:

{reasons}
"""


def case_list() -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["processes", "model", "loop", "layout", "optimizer", "habits"])
    writer.writerows(map(cells, CASES))
    return text.getvalue()


def cells(case: Case) -> list[str | int]:
    return [case.ranks.world, case.model, case.loop, case.layout, case.optimizer, "; ".join(case.habits)]


if __name__ == "__main__":
    PAGE.write_text(page())
    LIST.write_text(case_list())
    sys.stdout.write(case_list())
