"""transformers as a host: its mixtures of experts, built, watched, placed and saved. Needs transformers to be called,
not to be imported."""

from toolkit.hosts.transformers.anatomy import RouterWatch, experts_modules, routers, watch_routers
from toolkit.hosts.transformers.build import causal_lm
from toolkit.hosts.transformers.host import (
    PlacedExperts,
    place_experts,
    placed_experts,
    replan_callback,
    use_toolkit_ep,
)
from toolkit.hosts.transformers.kernel import use_toolkit_kernel
from toolkit.hosts.transformers.model_card import export_language_model
from toolkit.hosts.transformers.sampling import sample_tokens
from toolkit.hosts.transformers.saving import save_pretrained
from toolkit.hosts.transformers.shapes import describe_language_model, language_model_config
from toolkit.hosts.transformers.upcycle import upcycle

__all__ = [
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
    "watch_routers",
]
