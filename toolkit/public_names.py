"""Public names of a package, listed once in its stub and imported on first use."""

from __future__ import annotations

import ast
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def attach_stub(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` for the package whose `__init__.py` is `file`.

    The stub beside it, `__init__.pyi`, has a line `from .module import name as name` for each public name. Type
    checkers read the same lines.
    """
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    modules = {alias.name: "." * node.level + (node.module or "") for node in imports for alias in node.names}

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}{_elsewhere(name)}")
        place = import_module(modules[name], package)
        # A name that is no attribute is a submodule.
        return vars(place)[name] if name in vars(place) else import_module(f"{place.__name__}.{name}")

    return get, lambda: sorted(modules), sorted(modules)


def _elsewhere(name: str) -> str:
    """Return a sentence that names the package whose stub has `name`, if any has."""
    root = Path(__file__).parents[1]
    for stub in sorted(root.glob("toolkit/**/__init__.pyi")):
        if f" as {name}\n" in stub.read_text(encoding="utf-8"):
            package = ".".join(stub.relative_to(root).parent.parts)
            return f". Import it from {package}"
    return ""
