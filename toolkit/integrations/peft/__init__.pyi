"""The public names of `toolkit.integrations.peft`, once: editors and type checkers read them here."""

from .adapter_options import AdapterOptions as AdapterOptions
from .adapters import add_adapters as add_adapters
from .merged_weights import save_merged as save_merged
