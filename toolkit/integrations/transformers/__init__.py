"""Integration with transformers: MoE models loaded, watched, placed and saved."""

from toolkit.experts.moving.migrate import place_experts
from toolkit.experts.sharding.find import experts_modules, routers
from toolkit.integrations.transformers.kernel import use_toolkit_kernel
from toolkit.integrations.transformers.language_models import causal_lm, recompute_blocks
from toolkit.integrations.transformers.lazy_loading import experts_in_files
from toolkit.integrations.transformers.pretrained_files import save_pretrained, write_on_main
from toolkit.integrations.transformers.router_watch import RouterWatch, watch_routers
from toolkit.integrations.transformers.trainer_records import monitor_routers
from toolkit.integrations.transformers.upcycle import upcycle

__all__ = [
    "RouterWatch",
    "causal_lm",
    "experts_in_files",
    "experts_modules",
    "monitor_routers",
    "place_experts",
    "recompute_blocks",
    "routers",
    "save_pretrained",
    "upcycle",
    "use_toolkit_kernel",
    "watch_routers",
    "write_on_main",
]
