"""Expert parallelism with movable placement. Imports only torch until an integration is used.

    from toolkit import experts
    experts.shard_experts, experts.Replanner, experts.save, ...

The public names are listed in `__init__.pyi`. Each is imported on first use.
"""

from toolkit.public_names import attach_stub

<<<<<<< HEAD
__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
=======
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolkit.experts.layer.losses import RouterPenalty
    from toolkit.experts.layer.moe_layer import make_moe
    from toolkit.experts.moving.migrate import place_experts
    from toolkit.experts.moving.replan import Replanner
    from toolkit.experts.moving.replan_options import ReplanOptions
    from toolkit.experts.parallel.groups import ExpertGroups, make_expert_groups
    from toolkit.experts.parallel.sync import ExpertSync
    from toolkit.experts.placement.placement import ExpertPlacement
    from toolkit.experts.sharding.shard import shard_experts
    from toolkit.experts.state.checkpoint_files import load, save

_MODULES = {
    "ExpertGroups": "toolkit.experts.parallel.groups",
    "ExpertPlacement": "toolkit.experts.placement.placement",
    "ExpertSync": "toolkit.experts.parallel.sync",
    "ReplanOptions": "toolkit.experts.moving.replan_options",
    "Replanner": "toolkit.experts.moving.replan",
    "RouterPenalty": "toolkit.experts.layer.losses",
    "load": "toolkit.experts.state.checkpoint_files",
    "make_expert_groups": "toolkit.experts.parallel.groups",
    "make_moe": "toolkit.experts.layer.moe_layer",
    "place_experts": "toolkit.experts.moving.migrate",
    "save": "toolkit.experts.state.checkpoint_files",
    "shard_experts": "toolkit.experts.sharding.shard",
}
__all__ = [
    "ExpertGroups",
    "ExpertPlacement",
    "ExpertSync",
    "ReplanOptions",
    "Replanner",
    "RouterPenalty",
    "load",
    "make_expert_groups",
    "make_moe",
    "place_experts",
    "save",
    "shard_experts",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return __all__
>>>>>>> train
