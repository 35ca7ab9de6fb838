"""Modules that the fork server of the tests imports once, for all processes that tests fork."""

import gc
import importlib
import signal
from importlib.util import find_spec
from typing import IO

from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image

import benchmarks.support.preloaded  # noqa: F401

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup make test` sets it to ignored in all processes
for name in ("pytest", "typeguard", "tests.support.equality", "tests.support.small_run"):
    if find_spec(name.partition(".")[0]):
        importlib.import_module(name)


def print_empty(canvas: FigureCanvasAgg, file: IO[bytes]) -> None:
    """Replace `print_png`: rendering the figures of a run takes as long as training. Tests of figures render them in
    their own process."""
    Image.new("RGB", canvas.get_width_height()).save(file, format="png")


FigureCanvasAgg.print_png = print_empty  # type: ignore[method-assign]
gc.collect()
gc.freeze()
