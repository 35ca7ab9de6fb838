"""The public names of `toolkit.experts`, once: editors and type checkers read them here."""

from .layer.losses import RouterPenalty as RouterPenalty
from .layer.moe_layer import make_moe as make_moe
from .moving.copies import ema_update as ema_update
from .moving.copies import full_copy as full_copy
from .moving.migrate import place_experts as place_experts
from .moving.replan import Replanner as Replanner
from .moving.replan_options import ReplanOptions as ReplanOptions
from .muon import Muon as Muon
from .muon import muon_groups as muon_groups
from .parallel.groups import ExpertGroups as ExpertGroups
from .parallel.groups import make_expert_groups as make_expert_groups
from .parallel.penalty import parameter_penalty as parameter_penalty
from .parallel.sync import ExpertSync as ExpertSync
from .placement.placement import ExpertPlacement as ExpertPlacement
from .placement.planners.registry import register_planner as register_planner
from .router_monitor import RouterMonitor as RouterMonitor
from .routing.traces import read_trace as read_trace
from .sharding.fsdp import ExpertShards as ExpertShards
from .sharding.shard import shard_experts as shard_experts
from .state.checkpoint_files import load as load
from .state.checkpoint_files import save as save
