"""Registry of other libraries' experts for sharding. Nothing here imports these libraries.

A library is registered under the name of its package, with the module and name of its `Library` class. The module is
imported once a program has imported the package, because no model of the library exists before.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn

    from toolkit.experts.layer.stack import RowsInFiles

_registered: dict[str, tuple[str, str]] = {}


class Library:
    """A library's knowledge about its models. The defaults know nothing."""

    def stack_adapters(self, model: nn.Module, layers: Iterable[nn.Module]) -> None:
        """Turn the adapters of the experts modules `layers` of `model` into rows, one per expert, in place."""

    def adapter_rows(self, experts: nn.Module) -> dict[str, tuple[nn.Parameter, RowsInFiles]]:  # noqa: ARG002
        """Return the adapters of an experts module by name, as `stack_adapters` stacked them, and their form in
        files."""
        return {}

    def read_rows(self, experts: nn.Module, slots: Sequence[int]) -> dict[str, Tensor]:  # noqa: ARG002
        """Return the rows of the experts in `slots` by parameter, if the library loads them only now. A collective."""
        return {}

    def after_sharding(self, layers: Iterable[nn.Module]) -> None:
        """Called with the layers of a model once each has its `expert_stack`."""

    def save_whole_model(self, model: nn.Module, replace: Callable[[Any, str, Any], Any]) -> None:
        """Have the methods that save a sharded `model` gather the experts of all ranks.

        `replace(target, name, value)` replaces an attribute.
        """

    def projections(self, experts: nn.Module) -> tuple[str, ...]:  # noqa: ARG002
        """Return the names of an experts module's matrices in order of use; none if the library does not know them."""
        return ()

    def forward_with_adapters(
        self, experts: nn.Module, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor
    ) -> Tensor:
        """(T, D): the output of experts with known `projections`, with the products in their `low_rank`."""
        raise NotImplementedError

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


def library_that_multiplies(experts: nn.Module) -> Library | None:
    """Return the library that knows the `projections` of an experts module, or None."""
    return next((library for library in libraries() if library.projections(experts)), None)
