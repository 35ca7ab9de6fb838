"""Dynamic experts: they are split, merged and pruned while the model trains."""
