"""Integration with PEFT: adapters of sharded experts, saved as PEFT saves them."""

from toolkit.public_names import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
