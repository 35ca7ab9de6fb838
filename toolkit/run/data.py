"""Training data identity: recorded in config.json when a run begins, compared when it is continued."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toolkit.data.identity import Identity, describe, same_data
from toolkit.errors import UserError
from toolkit.experts.parallel.collectives import gather_objects

if TYPE_CHECKING:
    from toolkit.run.run import Run

REMEDY = "Give the dataset and data_dir that it was started with, or another run_dir"


def record_data(run: Run, **identities: Identity | None) -> None:
    """Record `identities` of data by use ("train", "test") in `run.data` and config.json. A collective.

    None stands for data that cannot be identified.

    Raises UserError on every rank if the data differ between ranks or from the continued run.
    """
    found = gather_objects({part: dict(of) for part, of in identities.items() if of is not None})

    def decide() -> dict[str, Any]:
        for rank, theirs in enumerate(found):
            if line := other_data(found[0], theirs):
                raise UserError(f"data: process 0 has {line} as process {rank}. Copy one dataset to all machines.")
        if line := other_data(run.data, found[0]):
            raise UserError(f"run_dir={run.folder}: the run was started with {line}. {REMEDY}.")
        return found[0] | run.data

    run.record_data(run.on_main_and_share(decide))


def other_data(before: dict[str, Any], now: dict[str, Any]) -> str | None:
    """Describe the first use in both with different data: "train data of 3 rows (digest 1a), not of 4 ..."."""
    for part in before.keys() & now.keys():
        if not same_data(before[part], now[part]):
            return f"{part} data of {describe(before[part])}, not of {describe(now[part])}"
    return None
