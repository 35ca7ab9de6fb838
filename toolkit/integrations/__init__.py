"""Integrations of expert parallelism with Accelerate, transformers and PEFT."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, ["peft", "transformers"])
