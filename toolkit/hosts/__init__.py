"""Models that are not ours: finding their experts, spreading them over ranks, and training them in any loop."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, ["transformers"])
