"""The public names of the package, and a page of reference for each folder that holds or lists some.

Public is what `toolkit.__all__` lists, and what the packages below it list in theirs. Nothing here is written by hand
for one name: a name that moves, or is new, is found where it stands. Only the standard library is needed, so that the
tests can ask which names lack a docstring without building the site.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import shutil
import sys
import textwrap
from dataclasses import is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple


class PublicName(NamedTuple):
    path: str
    """How a script writes it, such as `toolkit.Trainer`."""
    room: str
    """The package whose folder holds it, such as `toolkit.experts`."""
    kind: str
    """`class`, `function`, or `data` for everything else."""
    doc: str
    """Its own docstring, for data the string below the assignment; empty where there is none."""
    value: str = ""
    """The right side of the assignment, for data."""
    home: str = ""
    """The full name where it is defined, such as `toolkit.train.trainer.Trainer`."""
    derived: bool = False
    """A class with a base worth showing."""


def packages(root: str) -> list[ModuleType]:
    """The package called `root` and all packages below it."""
    first = importlib.import_module(root)
    below = (m.name for m in pkgutil.walk_packages(first.__path__, f"{root}.") if m.ispkg)
    return [first, *map(importlib.import_module, below)]


def public_names(root: str) -> list[PublicName]:
    """Every public name of the package called `root` once, under its shortest path, sorted by path."""
    found: dict[str, PublicName] = {}
    for package in packages(root):  # the root comes first, so its shorter paths win
        for public in listed(package):
            found.setdefault(public.home, public)
    return sorted(found.values(), key=lambda public: public.path.casefold())


def listed(package: ModuleType) -> list[PublicName]:
    """The names that a package lists, without modules."""
    values = {name: getattr(package, name) for name in getattr(package, "__all__", ()) if not name.startswith("__")}
    return [describe(package, name, value) for name, value in values.items() if not inspect.ismodule(value)]


def describe(package: ModuleType, name: str, value: Any) -> PublicName:
    path = f"{package.__name__}.{name}"
    if inspect.isclass(value) or inspect.isroutine(value):
        kind, doc = "class" if inspect.isclass(value) else "function", own_docstring(value)
        home, derived = f"{value.__module__}.{value.__qualname__}", getattr(value, "__bases__", (object,)) != (object,)
        return PublicName(path, room_of(value.__module__), kind, doc, home=home, derived=derived)
    module, expression, doc = assignment(package, name)
    return PublicName(path, room_of(module), "data", doc, expression, f"{module}.{name}")


def own_docstring(value: Any) -> str:
    """What was written for this object: neither its base's docstring nor the one that a dataclass makes for itself."""
    doc = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
    made = inspect.isclass(value) and (is_dataclass(value) or issubclass(value, tuple))
    return "" if not doc or (made and doc.startswith(f"{value.__name__}(")) else inspect.cleandoc(doc)


def room_of(module: str) -> str:
    """The package that holds a module; a package holds itself."""
    return module if hasattr(importlib.import_module(module), "__path__") else module.rpartition(".")[0]


def assignment(package: ModuleType, name: str) -> tuple[str, str, str]:
    """Where the value that `package` calls `name` is assigned: the module, the right side, and the string below it."""
    root, value = package.__name__.partition(".")[0], getattr(package, name)
    loaded = [module for path, module in sorted(sys.modules.items()) if path.partition(".")[0] == root]
    for module in loaded:
        if vars(module).get(name) is value:
            body = ast.parse(Path(inspect.getfile(module)).read_text()).body
            for statement, below in zip(body, [*body[1:], None], strict=True):
                if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value and assigns(statement, name):
                    return module.__name__, ast.unparse(statement.value), string_of(below)
    return package.__name__, "", ""


def assigns(statement: ast.Assign | ast.AnnAssign, name: str) -> bool:
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    return any(isinstance(target, ast.Name) and target.id == name for target in targets)


def string_of(statement: ast.stmt | None) -> str:
    """The text of a statement that is nothing but a string; empty for all others."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return inspect.cleandoc(str(statement.value.value))
    return ""


def first_sentence(doc: str) -> str:
    """The summary line of a docstring, up to the end of its first sentence."""
    paragraph = " ".join(doc.partition("\n\n")[0].split())
    return re.split(r"(?<=[.!?])\s+(?=[A-Z`])", paragraph)[0]


def write_pages(root: str, folder: Path) -> list[str]:
    """A page for each package that lists names or holds some, into `folder`, which is emptied first; returns their
    names, the root's first."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    names = public_names(root)
    pages = {package.__name__: page(package, names) for package in packages(root)}
    written = {name: text for name, text in pages.items() if text}
    for name, text in written.items():
        (folder / f"{name}.rst").write_text(text)
    return sorted(written)


def page(package: ModuleType, names: list[PublicName]) -> str:
    """reStructuredText, because that is what autodoc's directives are; the prose in it is Markdown. Empty for a package
    that has nothing to show. A name is described on the page of the folder that holds it; others lead there."""
    held = [public for public in names if public.room == package.__name__]
    target = {public.home: public.path for public in names}
    links = {public.home: public for public in [*held, *listed(package)]}.values()  # under the package's own path
    summary = "\n".join(
        f"- {{py:obj}}`{public.path} <{target[public.home]}>`: {first_sentence(public.doc)}"
        for public in sorted(links, key=lambda public: public.path.casefold())
    )
    title = f"{package.__name__}\n{'=' * len(package.__name__)}"
    intro = inspect.cleandoc(package.__doc__ or "")
    return (
        "\n\n".join(filter(None, [title, markdown(intro), markdown(summary), *map(entry, held)])) + "\n"
        if links
        else ""
    )


def entry(public: PublicName) -> str:
    if public.kind != "data":
        return f".. auto{public.kind}:: {public.path}" + public.derived * "\n   :show-inheritance:"
    module, _, name = public.path.rpartition(".")
    head = f".. py:data:: {name}\n   :module: {module}\n   :canonical: {public.home}\n   :value: {public.value}"
    return f"{head}\n\n{textwrap.indent(markdown(public.doc), '   ')}"


def markdown(text: str) -> str:
    """The directive of `markdown_docstrings.py` around `text`."""
    return f".. markdown::\n\n{textwrap.indent(text, '   ')}" if text else ""
