"""Callbacks: what happens between the lines of the training loop. The hooks are drawn in `base`."""
