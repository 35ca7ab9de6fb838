"""Process groups of expert parallelism, and parameters that are owned by ranks."""
