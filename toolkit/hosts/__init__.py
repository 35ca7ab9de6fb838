"""Expert parallelism for models and loops that are not ours: plain Accelerate, transformers and its Trainer."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, ["transformers"])
