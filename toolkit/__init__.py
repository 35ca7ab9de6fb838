"""A training toolkit on Hugging Face Accelerate with explicit, movable expert placement.

    import toolkit as tk
    tk.Trainer, tk.experts.make_moe, tk.ExpertParallel, ...

The public names are listed in `__init__.pyi`, where editors and type checkers read them. Each is imported on first use:
`import toolkit` and `--help` load neither torch nor transformers.
"""

from toolkit.experts.sharding.libraries import register
from toolkit.public_names import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)

# What sharding needs to know of these libraries' experts. Each is imported once a program has imported the library.
register("transformers", "toolkit.integrations.transformers.library", "TransformersLibrary")
register("peft", "toolkit.integrations.peft.adapter_rows", "PeftLibrary")
