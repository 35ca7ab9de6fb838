"""Tests. Importing this package has the shapes of tensors checked from then on, but in forks that a test starts.

Every module of `toolkit/` and of a recipe's subject that annotates tensors with jaxtyping is imported with its
functions and dataclasses wrapped: a call whose tensors do not have the shapes of the annotations raises
`jaxtyping.TypeCheckError`.
"""

import sys
import typing
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jaxtyping
from jaxtyping import AbstractArray, _import_hook, install_import_hook

_ROOT = Path(__file__).resolve().parent.parent


def check_shapes(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, checking the tensors that are annotated with shapes, and nothing else."""
    shaped = {name: hint for name, hint in function.__annotations__.items() if _has_shape(hint)}
    if not shaped:
        return function
    from beartype import beartype

    function.__annotations__ = shaped
    return beartype(function)


def _has_shape(hint: Any) -> bool:
    is_shape = isinstance(hint, type) and issubclass(hint, AbstractArray)
    return is_shape or any(_has_shape(part) for part in typing.get_args(hint))


def modules_with_shapes() -> list[str]:
    """Returns the modules of `toolkit/` and of the subjects of `recipes/` that import jaxtyping."""
    found = [(path, _ROOT) for path in (_ROOT / "toolkit").rglob("*.py")]
    found += [(path, _ROOT / "recipes") for path in (_ROOT / "recipes").glob("*/*.py")]
    return sorted(
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        for path, root in found
        if "from jaxtyping import" in path.read_text()
    )


NAMES = ("Bool", "Float", "Int", "Integer", "Num", "Shaped", "UInt8")


class _NamingLoader(_import_hook._JaxtypingLoader):
    """Gives modules the names of jaxtyping, which `toolkit.experts` imports for type checkers only."""

    def exec_module(self, module: Any) -> None:
        vars(module).update({name: getattr(jaxtyping, name) for name in NAMES})
        super().exec_module(module)


# The functions that ranks call are also called in the tests' own process, and checks would take a third of their time.
_IN_FORKS = any("multiprocessing.forkserver" in word for word in sys.orig_argv)
# Benchmarks use helpers of the tests, also where only what training needs is installed.
if find_spec("beartype") and not _IN_FORKS:
    _import_hook._JaxtypingLoader = _NamingLoader
    install_import_hook(modules_with_shapes(), "tests.check_shapes")
