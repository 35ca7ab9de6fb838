"""Private names of datasets and wandb that the toolkit relies on, each behind one function.

`tests/test_compat.py` tests the behaviour that each function relies on.
"""

from __future__ import annotations

from typing import Any


def fingerprint(dataset: Any) -> str:
    """A hash of a `datasets.Dataset` and what was done to it: the same in each process that loads the same."""
    return dataset._fingerprint


def is_wandb_service(process_name: str) -> bool:
    """Whether a child process of this name is wandb's service."""
    return process_name.startswith("wandb-core")


def workspace_as_json(workspace: Any) -> str:
    """Return what a workspace of wandb_workspaces sends to W&B when it is saved."""
    return workspace._to_model().spec.model_dump_json(by_alias=True, exclude_none=True, indent=2)
