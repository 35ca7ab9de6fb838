"""Expert parallelism for models and loops that are not ours: plain Accelerate, transformers and its Trainer.

What a library's models need is registered here, and is imported with that library:
`toolkit.experts.hosts.spreading.libraries`.
"""

import lazy_loader

from toolkit.experts.hosts.spreading.libraries import Library, register

__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, ["transformers"])


def _transformers() -> Library:
    from toolkit.experts.hosts.transformers.kernel import TransformersLibrary

    return TransformersLibrary()


def _peft() -> Library:
    from toolkit.experts.hosts.peft.adapter_rows import PeftLibrary

    return PeftLibrary()


register("transformers", _transformers)
register("peft", _peft)
