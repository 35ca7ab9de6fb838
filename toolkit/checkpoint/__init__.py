"""Checkpoints: atomic, verified by SHA-256, without pickle, loaded under any layout."""
