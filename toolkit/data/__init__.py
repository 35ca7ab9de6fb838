"""Data sets as tables of tensors, and the order in which their rows are used.

The public names are listed in `__init__.pyi` and are imported when they are first used.
"""

from toolkit.public_names import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
