"""Continual learning: one task after another, and what is forgotten."""
