"""Integration with transformers: MoE models loaded, watched, placed, trained and saved.

The public names are listed in `__init__.pyi`. Each is imported on first use.
"""

from toolkit.public_names import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
