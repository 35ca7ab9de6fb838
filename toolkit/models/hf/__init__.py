"""transformers as a host: its mixtures of experts, built, watched, placed and saved. Needs transformers to be called,
not to be imported."""

from toolkit.models.hf.anatomy import GlobalRouterPenalty, RouterWatch, experts_modules, routers
from toolkit.models.hf.build import causal_lm
from toolkit.models.hf.host import PlacedExperts, place_experts, placed_experts, replan_callback, use_toolkit_ep
from toolkit.models.hf.kernel import use_toolkit_kernel
from toolkit.models.hf.model_card import export_language_model
from toolkit.models.hf.sampling import sample_tokens
from toolkit.models.hf.saving import save_pretrained
from toolkit.models.hf.shapes import describe_language_model, language_model_config
from toolkit.models.hf.upcycle import upcycle

__all__ = [
    "GlobalRouterPenalty",
    "PlacedExperts",
    "RouterWatch",
    "causal_lm",
    "describe_language_model",
    "experts_modules",
    "export_language_model",
    "language_model_config",
    "place_experts",
    "placed_experts",
    "replan_callback",
    "routers",
    "sample_tokens",
    "save_pretrained",
    "upcycle",
    "use_toolkit_ep",
    "use_toolkit_kernel",
]
