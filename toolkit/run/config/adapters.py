"""What is trained of a pretrained mixture. Names and descriptions are those of a recipe's flags."""

from __future__ import annotations

import math
from dataclasses import dataclass

from toolkit.run.config.run import require


@dataclass(frozen=True, kw_only=True)
class AdapterOptions:
    """Adapters, and what is trained in full.

    What `toolkit.experts.hosts.peft.lora_model.add_adapters` takes.
    """

    lora_rank: int = 8
    """Rank of the adapters (LoRA); 0 adds none and trains the model's own weights."""
    lora_alpha: float = 16.0
    """What adapters add is scaled by this over --lora-rank."""
    lora_experts: bool = True
    """Adapters of the experts."""
    lora_attention: bool = True
    """Adapters of attention."""
    freeze_router: bool = True
    """Leave the routers untrained; without it they are trained in full, and saved with the adapters."""
    merge: bool = False
    """Also write the model with its adapters merged, as plain transformers weights, to merged/ in the run's folder."""

    def check(self) -> None:
        """Raise UserError where the options leave nothing to train, or to merge."""
        require(self.lora_rank >= 0, "lora_rank", self.lora_rank, "take one or more, or 0 to train all weights")
        require(0 < self.lora_alpha < math.inf, "lora_alpha", self.lora_alpha, "take a positive number")
        any_of = self.lora_rank == 0 or self.lora_experts or self.lora_attention
        remedy = "adapters of neither experts nor attention: leave one of --no-lora-experts, --no-lora-attention out"
        require(any_of, "lora_rank", self.lora_rank, remedy)
        remedy = "there are no adapters with --lora-rank 0, and model/ has the weights: leave it out"
        require(not self.merge or self.lora_rank > 0, "merge", self.merge, remedy)

    @property
    def trained(self) -> str:
        """What is trained, in words."""
        if self.lora_rank == 0:
            return "all weights but routers" if self.freeze_router else "all weights"
        parts = ["experts"] * self.lora_experts + ["attention"] * self.lora_attention
        return f"adapters of {' and '.join(parts)}" + (", and routers" if not self.freeze_router else "")
