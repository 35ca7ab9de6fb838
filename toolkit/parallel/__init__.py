"""Parameters that are owned by ranks, and parameters that FSDP2 shards."""
