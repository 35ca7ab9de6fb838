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


def page() -> str:
    factors = {
        "model": MODELS,
        "loop": LOOPS,
        "layout": LAYOUTS,
        "layout of single cases": MORE_LAYOUTS,
        "optimizer": OPTIMIZERS,
        "habit": dict.fromkeys(habit for case in CASES for habit in case.habits if "float" not in habit),
    }
    rows = "\n".join(f"| {name} | {'; '.join(values)} |" for name, values in factors.items())
    reasons = "\n".join(f"- {reason}" for reason, _, _ in UNSUPPORTED)
    pairs = sum(1 for _ in supported_pairs())
    return f"""# Tested combinations

`make test` trains {len(CASES)} [cases](parity.csv) in float64 and compares losses, gradient norms, gradients, weights
and optimizer states with a plain torch loop of one process, to 1e-10. They cover all {pairs:,} supported pairs of
these values. `python -m tests.parity.page` writes this page from `tests/parity/case.py`.

| factor | values |
|---|---|
{rows}

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
