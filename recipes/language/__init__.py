"""Language models: small ones, their samples and model cards, and fine-tuning with adapters."""

from typing import Literal

Architecture = Literal["qwen3_moe", "mixtral"]
"""Language models that are made from scratch."""
