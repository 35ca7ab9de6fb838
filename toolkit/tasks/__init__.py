"""Tasks: how a batch becomes a loss."""

from toolkit.tasks.classification import Classification
from toolkit.tasks.language_modeling import LanguageModeling

__all__ = ["Classification", "LanguageModeling"]
