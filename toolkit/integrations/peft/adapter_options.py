"""The options of LoRA adapters."""

from __future__ import annotations

from pydantic import NonNegativeInt, PositiveFloat

from toolkit.errors import require
from toolkit.experts.options import Options


class AdapterOptions(Options):
    """Options of adapters; names and descriptions are those of the recipe's flags."""

    lora_rank: NonNegativeInt = 8
    """Rank of the adapters (LoRA); 0 adds none and trains the model's own weights."""
    lora_alpha: PositiveFloat = 16.0
    """Adapters are scaled by this divided by the rank."""
    lora_experts: bool = True
    """Adapters of the experts."""
    lora_attention: bool = True
    """Adapters of attention."""
    freeze_router: bool = True
    """Leave the routers untrained; without it they are trained in full, and saved with the adapters."""
    merge: bool = False
    """Also write the model with its adapters merged, as plain transformers weights, to merged/ in the run's folder."""

    def check_together(self) -> None:
        super().check_together()
        any_of = self.lora_rank == 0 or self.lora_experts or self.lora_attention
        remedy = "adapters of neither experts nor attention: leave lora_experts=False or lora_attention=False out"
        require(any_of, "lora_rank", self.lora_rank, remedy)
        remedy = "there are no adapters with lora_rank=0, and model/ has the weights: leave it out"
        require(not self.merge or self.lora_rank > 0, "merge", self.merge, remedy)

    @property
    def trained(self) -> str:
        """Trained weights, in words."""
        if self.lora_rank == 0:
            return "all weights but routers" if self.freeze_router else "all weights"
        parts = ["experts"] * self.lora_experts + ["attention"] * self.lora_attention
        return f"adapters of {' and '.join(parts)}" + (", and routers" if not self.freeze_router else "")
