"""Registry of other libraries' experts for sharding. Nothing here imports these libraries.

A library is registered under the name of its package, with the module and name of its `Library` class. The module is
imported once a program has imported the package, because no model of the library exists before.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from toolkit.experts.layer.rows_in_files import RowsInFiles
    from toolkit.experts.sharding.layout import CalledByIds

_registered: dict[str, tuple[str, str]] = {}


class Adapters(Protocol):
    """The adapters of one experts module, with matrices of all experts in the library's own layout."""

    parameters: dict[str, tuple[nn.Parameter, RowsInFiles]]
    """By name, with their layout."""

    def fault(self, name: str) -> str | None:
        """Return why the adapters of the experts at `name` cannot have one row per expert, or None."""

    def use_rows(self, num_experts: int) -> None:
        """Have the adapters compute with one row per expert of `parameters`, which get theirs afterwards."""


class Library:
    """A library's knowledge about its models. The defaults know nothing."""

    layout: type[CalledByIds] | None = None
    """Layout of experts whose `projections` the library knows."""

    def find_adapters(self, model: nn.Module) -> Mapping[nn.Module, Adapters]:  # noqa: ARG002
        """Return the adapters of modules of `model` whose parameters are not rows yet, by module."""
        return {}

    def save_whole_model(self, model: nn.Module, replace: Callable[[Any, str, Any], Any]) -> None:
        """Have the methods that save a sharded `model` gather the experts of all ranks.

        `replace(target, name, value)` replaces an attribute.
        """

    def projections(self, experts: nn.Module) -> tuple[str, ...]:  # noqa: ARG002
        """Return the names of an experts module's matrices in order of use; none if the library does not know them."""
        return ()

    def record(self, model: nn.Module) -> Callable[[Path], None] | None:  # noqa: ARG002
        """Return a function that writes more files of `model` into its folder on rank 0, or None. A collective."""
        return None


def register(package: str, module: str, name: str) -> None:
    """Register the `Library` class `name` of `module` for the library `package`."""
    _registered[package] = (module, name)


def libraries() -> list[Library]:
    """Return the registered libraries that this program has imported."""
    found = [place for package, place in _registered.items() if package in sys.modules]
    return [getattr(importlib.import_module(module), name)() for module, name in found]


def library_of(experts: nn.Module) -> Library:
    """Return the library that knows the `projections` of an experts module, or one that knows nothing."""
    return next((library for library in libraries() if library.projections(experts)), Library())
