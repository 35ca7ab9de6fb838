"""Expert parallelism with movable placement. Imports only torch until an integration is used.

    from toolkit import experts
    experts.shard_experts, experts.Replanner, experts.save, ...

The public names are listed in `__init__.pyi`. Each is imported on first use.
"""

from toolkit.public_names import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
