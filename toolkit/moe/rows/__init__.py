"""Rows of hidden states on their way to the experts and back: their order, and how they are moved."""
