"""A training toolkit on Hugging Face Accelerate with explicit, movable expert placement.

    import toolkit as tk
    tk.Trainer, tk.experts.make_moe, tk.experts, ...

The public names are listed in `__init__.pyi`, where editors and type checkers read them, and are imported when they are
first used: `import toolkit` and `--help` load neither torch nor transformers.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
