"""Modules that the fork server imports once, for all processes that tests fork.

The garbage collector skips the objects here: else each fork would traverse them, and copy their pages.
"""

import gc
import importlib
import signal
from importlib.util import find_spec
from typing import IO

from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which `nohup make test` has every process ignore

MODULES = (
    "tests",
    "pytest",
    "torch._dynamo",  # with sympy behind it: DDP and optimizers import it when they are first used
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
    "typeguard",
    "tests.support.equality",
    "tests.support.small_run",
    "toolkit.run.cli",
    "toolkit.run.launch.agent",
    "torch.distributed.launcher",
    "toolkit.train.build",
    "toolkit.dynamic.callback",
)

for name in MODULES:
    if find_spec(name.partition(".")[0]):  # some are installed for developers only
        importlib.import_module(name)
if find_spec("transformers"):
    # Its table of all families is made when it is first asked for one.
    importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("mixtral")


def print_empty(canvas: FigureCanvasAgg, file: IO[bytes]) -> None:
    """Replace `print_png`: rendering the figures of a run takes as long as its training. Tests of figures render them
    in their own process."""
    Image.new("RGB", canvas.get_width_height()).save(file, format="png")


FigureCanvasAgg.print_png = print_empty  # type: ignore[method-assign]
gc.collect()
gc.freeze()
gc.set_threshold(50_000)  # a fork ends before its garbage counts
