"""Experts that can be anywhere, in anybody's loop: torch and small libraries only, until a host is asked for.

    from toolkit import experts
    experts.shard_experts, experts.Replanner, experts.save, ...

The public names are listed in `__init__.pyi` and are imported when they are first used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
