"""Process groups of expert parallelism, parameters that are owned by ranks, and parameters that FSDP2 shards."""
