"""Tasks: how a batch becomes a loss."""

from toolkit.tasks.classification import Classification

__all__ = ["Classification"]
