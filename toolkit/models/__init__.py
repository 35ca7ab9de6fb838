"""Models: single-device code, one family per file."""

from toolkit.models.mlp import MLP, Pixels, ResidualClassifier

__all__ = ["MLP", "Pixels", "ResidualClassifier"]
