"""Which expert parallelism of which library trains as one process does."""
