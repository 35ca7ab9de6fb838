"""Models: single-device code, one family per file."""

from toolkit.models.lmu import LMU, ParallelLMU, SequenceClassifier
from toolkit.models.mlp import MLP, Pixels, ResidualClassifier

__all__ = ["LMU", "MLP", "ParallelLMU", "Pixels", "ResidualClassifier", "SequenceClassifier"]
