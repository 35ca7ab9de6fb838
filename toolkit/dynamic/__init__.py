"""Dynamic experts: experts that are split, merged and pruned during training."""
