"""The public names of `toolkit.dynamic`, once: editors and type checkers read them here."""

from .lifecycle_options import DynamicRunConfig as DynamicRunConfig
from .lifecycle_options import LifecycleOptions as LifecycleOptions
from .setup import lifecycle_callbacks as lifecycle_callbacks
from .setup import moe_from_config as moe_from_config
