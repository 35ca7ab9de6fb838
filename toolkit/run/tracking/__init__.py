"""Where metrics go: a JSON Lines file, W&B and TensorBoard."""
