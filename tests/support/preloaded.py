"""What a process that a test forks has imported already: the fork server imports this once.

The garbage collector leaves what is here alone: else each fork would walk through it, and so copy its pages.
"""

import gc
import importlib
import io
from importlib.util import find_spec

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

MODULES = (
    "tests",
    "pytest",
    "torch._dynamo",  # with sympy behind it: DDP and optimizers import it when they are first used
    "accelerate",
    "transformers.models.auto.modeling_auto",
    "transformers.models.mixtral.modeling_mixtral",
    "transformers.trainer",
    "peft",
    "networkx",
    "scipy.optimize",
    "sklearn.datasets",
    "tyro",
    "tests.support.equality",
    "tests.support.small_run",
    "toolkit.train.build",
    "toolkit.train.callbacks.lifecycle",
)

for name in MODULES:
    if find_spec(name.partition(".")[0]):  # some are installed for developers only
        importlib.import_module(name)
EMPTY = io.BytesIO()
FigureCanvasAgg(Figure(figsize=(0.1, 0.1))).print_png(EMPTY)
# To render the pictures of a run takes as long as its training. Tests of pictures render them in their own process.
FigureCanvasAgg.print_png = lambda self, path: path.write_bytes(EMPTY.getvalue())  # type: ignore

gc.collect()
gc.freeze()
