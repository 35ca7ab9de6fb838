"""Data sets as tables of tensors, and the order in which their rows are used.

The public names are listed in `__init__.pyi` and are imported when they are first used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
