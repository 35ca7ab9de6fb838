"""Integration with PEFT: adapters of sharded experts, saved as PEFT saves them."""
