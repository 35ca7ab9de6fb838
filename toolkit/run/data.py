"""The data that a run trains on: recorded in config.json when it begins, compared when it is continued."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toolkit.data.identity import Identity, describe, same_data
from toolkit.errors import UserError
from toolkit.experts.parallel.collectives import gather_objects

if TYPE_CHECKING:
    from toolkit.run.run import Run

REMEDY = "give the dataset and data_dir that it was started with, or another run_dir"


def record_data(run: Run, **identities: Identity | None) -> None:
    """Note `identities` of data by their use ("train", "test") in `run.data` and config.json. A collective.

    None is of data that cannot be told from others.

    Raises UserError on every rank where another process, or the run that is continued, has other data.
    """
    found = gather_objects({part: dict(of) for part, of in identities.items() if of is not None})

    def decide() -> dict[str, Any]:
        for rank, theirs in enumerate(found):
            if line := other_data(found[0], theirs):
                raise UserError(f"the data of processes differ: process 0 has {line} as process {rank}: copy one set.")
        if line := other_data(run.data, found[0]):
            raise UserError(f"the run in {run.folder} was started with {line}: {REMEDY}.")
        return found[0] | run.data

    run.record_data(run.on_main_and_share(decide))


def other_data(before: dict[str, Any], now: dict[str, Any]) -> str | None:
    """The first use of data, present in both, whose data differ: "train data of 3 rows (digest 1a), not of 4 ..."."""
    for part in before.keys() & now.keys():
        if not same_data(before[part], now[part]):
            return f"{part} data of {describe(before[part])}, not of {describe(now[part])}"
    return None
