"""What spreading has to know of other libraries' experts, which they register; nothing here imports one of them.

A library is registered under the name of its package, with the module and name of its `Library`. That module is
imported once a program has imported the package: without it there are no models of the library.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn

    from toolkit.experts.parallel.ownership import RowsInFiles

_registered: dict[str, tuple[str, str]] = {}


class Library:
    """What a library knows of its models. Each method here is that of a library with nothing to add."""

    def refuse_spread(self, model: nn.Module) -> None:
        """Raise UserError where the library has spread the experts of `model` itself."""

    def why_no_experts(self, model: nn.Module) -> str | None:  # noqa: ARG002
        """Return a sentence on why `model` has no experts that can be spread; None where the library knows none."""
        return None

    def stack_adapters(self, model: nn.Module, layers: Iterable[nn.Module]) -> None:
        """Turn the adapters of the experts modules `layers` of `model` into rows, one for each expert, in place."""

    def adapter_rows(self, experts: nn.Module) -> dict[str, tuple[nn.Parameter, RowsInFiles]]:  # noqa: ARG002
        """Return the adapters of an experts module by name, as `stack_adapters` stacked them, and how files have
        them."""
        return {}

    def projections(self, experts: nn.Module) -> tuple[str, ...]:  # noqa: ARG002
        """Return the matrices of an experts module in order of use; none where the library does not know them."""
        return ()

    def forward_with_adapters(
        self, experts: nn.Module, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor
    ) -> Tensor:
        """Return the output (T, D) of experts of known `projections`, with the products that their `low_rank` lists."""
        raise NotImplementedError

    def record(self, model: nn.Module) -> Callable[[Path], None] | None:  # noqa: ARG002
        """Return what rank 0 writes into the folder of a saved `model`, beside its files; None for nothing.

        A collective.
        """
        return None


def register(package: str, module: str, name: str) -> None:
    """Take the `Library` class `name` of `module` for models of the library `package`, once a program imports that."""
    _registered[package] = (module, name)


def libraries() -> list[Library]:
    """Return the registered libraries that this program has imported."""
    found = [place for package, place in _registered.items() if package in sys.modules]
    return [getattr(importlib.import_module(module), name)() for module, name in found]


def library_that_multiplies(experts: nn.Module) -> Library | None:
    """Return the library that knows the `projections` of an experts module; None where none does."""
    return next((library for library in libraries() if library.projections(experts)), None)
