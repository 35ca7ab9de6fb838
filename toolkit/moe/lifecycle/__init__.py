"""Experts that live: they are grown, merged and pruned while the model trains."""
