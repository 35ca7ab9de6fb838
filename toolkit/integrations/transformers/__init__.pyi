"""The public names of `toolkit.integrations.transformers`, once: editors and type checkers read them here."""

from ...experts.moving.migrate import place_experts as place_experts
from ...experts.sharding.find import experts_modules as experts_modules
from ...experts.sharding.find import routers as routers
from .kernel import use_toolkit_kernel as use_toolkit_kernel
from .language_models import causal_lm as causal_lm
from .language_models import recompute_blocks as recompute_blocks
from .lazy_loading import experts_in_files as experts_in_files
from .pretrained_files import save_pretrained as save_pretrained
from .pretrained_files import write_on_main as write_on_main
from .router_watch import RouterWatch as RouterWatch
from .router_watch import watch_routers as watch_routers
from .trainer import expert_trainer as expert_trainer
from .trainer_records import monitor_routers as monitor_routers
from .upcycling import upcycle as upcycle
