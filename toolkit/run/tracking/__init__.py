"""Metric outputs: a JSON Lines file, W&B and TensorBoard."""
