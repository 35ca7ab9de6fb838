"""Libraries that the fork server imports once, for all processes that it forks.

Freezing the garbage collector keeps forks from traversing the imported objects and copying their pages.
"""

import gc
import importlib
from importlib.util import find_spec

MODULES = (
    "torch._dynamo",  # imported late by DDP and optimizers
    "torch.distributed.launcher",
    "accelerate",
    "transformers.models.auto.modeling_auto",
    "transformers.models.mixtral.modeling_mixtral",
    "transformers.trainer",
    "peft",
    "matplotlib.figure",
    "networkx",
    "scipy.optimize",
    "sklearn.datasets",
    "tyro",
    "tyro._backends._tyro_backend",
    "benchmarks.support.precision",
    "toolkit.run.cli",
    "toolkit.run.launch.agent",
    "toolkit.train.build",
    "toolkit.dynamic.callback",
)

for name in MODULES:
    if find_spec(name.partition(".")[0]):  # some are optional
        importlib.import_module(name)
if find_spec("transformers"):
    # The first call builds a table of all families.
    importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("mixtral")
gc.collect()
gc.freeze()
gc.set_threshold(50_000)
