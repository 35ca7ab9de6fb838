"""Who may import whom. No file is excepted."""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.helpers import ROOT

TOOLKIT = sorted((ROOT / "toolkit").rglob("*.py"))
RECIPES = sorted((ROOT / "recipes").rglob("*.py"))

FLOORS = """
toolkit.__main__
toolkit.commands  toolkit
toolkit.audit  toolkit.doctor  toolkit.lab
toolkit.dynamic
toolkit.train
toolkit.checkpoint
toolkit.run
toolkit.data
toolkit.integrations.peft
toolkit.integrations.transformers
toolkit.integrations.accelerate
toolkit.integrations
toolkit.experts
toolkit.experts.moving
toolkit.experts.sharding
toolkit.experts.routing
toolkit.experts.state
toolkit.experts.layer
toolkit.experts.parallel
toolkit.experts.placement
toolkit.experts.compat  toolkit.experts.options
toolkit.compat  toolkit.version
toolkit.errors  toolkit.public_names
"""
"""Folders and files from top to bottom. Each imports from the floors below it only: not above, not beside. An import
that is for type checkers only counts as well."""

FENCES = {
    "tyro": ("toolkit.run.cli",),
    "wandb": (),
    "accelerate": (
        "toolkit.run",
        "toolkit.data",
        "toolkit.doctor",
        "toolkit.integrations.accelerate",
    ),
    "transformers": ("toolkit.integrations.transformers", "toolkit.data.tokenizer"),
    "peft": ("toolkit.integrations.peft",),
    "matplotlib": ("toolkit.run.pictures", "toolkit.dynamic"),
    "bokeh": ("toolkit.commands.report",),
    "wandb_workspaces": ("toolkit.commands.report",),
    "fsspec": ("toolkit.run",),
    "datasets": ("toolkit.data",),
    "pickle": ("toolkit.audit.tensors",),
    "cloudpickle": (),
    "dill": (),
    "marshal": (),
    "shelve": (),
    "joblib": (),
}
"""A library -> where in `toolkit/` it may be imported."""
ONLY_INSIDE_FUNCTIONS = {"matplotlib", "bokeh", "wandb_workspaces", "datasets", "transformers"}
OF_THE_EXPERTS = {
    "torch",
    "numpy",
    "pydantic",
    "safetensors",
    "toolkit",
}
"""Libraries that `toolkit/experts/` imports."""
FLAGS_ARE_KNOWN_TO = (
    "toolkit.commands",
    "toolkit.audit",
    "toolkit.doctor",
    "toolkit.lab",
    "toolkit.train",
    "toolkit.run",
    "toolkit.errors",
)
PICKLING_CALLS = {("torch", "load"), ("torch", "save")}


@dataclass(frozen=True)
class Import:
    """An import as it is written, wherever it stands in a file."""

    module: str
    name: str | None
    """What `from module import name` takes; None for `import module`."""
    when_imported: bool
    """Whether it runs when its file is imported: it is not in a function."""
    for_types: bool
    """Whether it never runs."""


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


@functools.cache
def imports(path: Path) -> tuple[Import, ...]:
    def visit(node: ast.AST, at_import: bool, for_types: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, None, at_import, for_types) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide who imports whom"
            yield from (Import(node.module or "", alias.name, at_import, for_types) for alias in node.names)
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for child in node.body:
                yield from visit(child, False, True)
            for child in node.orelse:
                yield from visit(child, at_import, for_types)
        else:
            inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            for child in ast.iter_child_nodes(node):
                yield from visit(child, at_import and not inside, for_types)

    return tuple(visit(parsed(path), True, False))


def modules_imported(path: Path, files: dict[str, Path], *, for_types: bool) -> set[str]:
    """The modules among `files` that `path` imports, also by their names at run time, as sub-commands are."""
    named = set()
    for found in imports(path):
        if for_types or not found.for_types:
            submodule = f"{found.module}.{found.name}"
            named.add(submodule if submodule in files else found.module)
    if not for_types:
        texts = {node.value for node in ast.walk(parsed(path)) if isinstance(node, ast.Constant)}
        named |= {text for text in texts if isinstance(text, str) and "." in text}
    return {module for module in named if module in files and module != module_name(path)}


def within(name: str, *places: str) -> bool:
    return any(name == place or name.startswith(place + ".") for place in places)


ROOMS = [line.split() for line in FLOORS.split("\n") if line]
FILES = {module_name(path): path for path in TOOLKIT}


def floor_and_room(module: str) -> tuple[int, str]:
    """The floor of `module`, counted from the top, and its room: the innermost where rooms contain each other."""
    rooms = [(len(room), number, room) for number, floor in enumerate(ROOMS) for room in floor if within(module, room)]
    _, number, room = max(rooms)
    assert (room == "toolkit") == (module == "toolkit"), f"{module} is in no room: name it in FLOORS"
    return number, room


def test_every_module_has_a_floor_and_every_floor_a_module():
    assert {floor_and_room(module)[1] for module in FILES} == {room for floor in ROOMS for room in floor}


def test_imports_run_down_only():
    upward = []
    for name, path in FILES.items():
        floor, room = floor_and_room(name)
        for imported in sorted(modules_imported(path, FILES, for_types=True)):
            below, other = floor_and_room(imported)
            if other != room and below <= floor:
                upward.append(f"{name} ({room}) imports {imported} ({other})")
    assert not upward, "\n".join(upward)


def test_modules_form_no_circle():
    graph = {name: modules_imported(path, FILES, for_types=False) for name, path in FILES.items()}
    finished: set[str] = set()

    def visit(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, " -> ".join([*way[way.index(module) :], module])
        if module not in finished:
            for imported in graph[module]:
                visit(imported, (*way, module))
            finished.add(module)

    for module in graph:
        visit(module, ())


def test_a_sub_command_can_be_deleted_and_the_others_still_work():
    rooms = {path.stem if path.is_file() else path.name for path in (ROOT / "toolkit" / "commands").iterdir()}
    shared = {"__init__", "__pycache__"}
    for name, path in FILES.items():
        for imported in modules_imported(path, FILES, for_types=True) if within(name, "toolkit.commands") else ():
            mine, other = (each.split(".")[2:3] for each in (name, imported))
            between = mine != other and within(imported, "toolkit.commands") and mine and other
            assert not between or other[0] in shared, f"{name} imports {imported}"
    assert rooms > shared - {"__pycache__"}


def test_toolkit_knows_no_recipe_and_recipes_know_no_tests():
    subjects = {path.name for path in (ROOT / "recipes").iterdir() if path.is_dir()}
    for path in [*TOOLKIT, *RECIPES]:
        of_others = {"recipes", "tests", "benchmarks"} | (subjects if path in TOOLKIT else set())
        for found in imports(path):
            assert found.module.partition(".")[0] not in of_others, f"{module_name(path)} imports {found.module}"
    for path in TOOLKIT:
        whole = [found for found in imports(path) if (found.module, found.name) == ("toolkit", None)]
        assert not whole, f"{module_name(path)}: `import toolkit` hides who imports whom"


def test_recipe_imports_of_the_toolkit_are_its_public_face():
    face = {"toolkit", "toolkit.experts"}
    deep = {
        f"{module_name(path)} imports {found.module}"
        for path in RECIPES
        for found in imports(path)
        if within(found.module, "toolkit") and found.module not in face
    }
    assert not deep, "\n".join(sorted(deep))


def test_a_library_is_imported_only_behind_its_fence():
    wrong = []
    for name, path in FILES.items():
        for found in imports(path):
            library = found.module.partition(".")[0]
            if library in FENCES and not found.for_types and not within(name, *FENCES[library]):
                wrong.append(f"{name} imports {found.module}")
            if found.when_imported and library in ONLY_INSIDE_FUNCTIONS:
                wrong.append(f"{name} imports {found.module} outside a function")
    for library, places in FENCES.items():
        for place in places:
            inside = [path for name, path in FILES.items() if within(name, place)]
            if not any(found.module.partition(".")[0] == library for path in inside for found in imports(path)):
                wrong.append(f"{place} does not import {library}: the fence is too wide")
    assert not wrong, "\n".join(wrong)


def test_experts_need_torch_and_small_libraries_only():
    for name, path in FILES.items():
        if within(name, "toolkit.experts"):
            for found in imports(path):
                library = found.module.partition(".")[0]
                known = OF_THE_EXPERTS | sys.stdlib_module_names | ({"jaxtyping"} if found.for_types else set())
                assert library in known, f"{name} imports {found.module}"


def test_only_the_command_line_speaks_of_flags():
    said = []
    for name, path in FILES.items():
        if not within(name, *FLAGS_ARE_KNOWN_TO) and name != "toolkit":
            said += [f"{name}: {flag}" for flag in re.findall(r"(?<![\w\-<!|:])--[a-z][\w.-]*", path.read_text())]
    assert not said, "\n".join(said)


def test_messages_name_no_file_that_an_installed_package_lacks():
    for path in TOOLKIT:
        tree = ast.parse(path.read_text())
        docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
                found = re.search(r"\b(docs|recipes|tests|benchmarks|accelerate_configs)/\w", node.value)
                assert found is None, f"{path}:{node.lineno}: {node.value}"


def test_nothing_is_read_or_written_as_pickle():
    for path in TOOLKIT:
        for node in ast.walk(parsed(path)):
            if not isinstance(node, ast.Call):
                continue
            if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
                assert (node.func.value.id, node.func.attr) not in PICKLING_CALLS, path
            for keyword in node.keywords:
                value = keyword.value.value if isinstance(keyword.value, ast.Constant) else "computed"
                assert keyword.arg != "weights_only", path
                assert keyword.arg != "allow_pickle" or value is False, f"{path}: allow_pickle={value}"


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@functools.cache
def our_private_names() -> frozenset[str]:
    """The private names that `toolkit/` defines: functions, classes, attributes of `self`, and fields."""
    names: set[str] = set()
    for path in TOOLKIT:
        for node in ast.walk(parsed(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names |= {node.attr} if ast.unparse(node.value) in ("self", "cls") else set()
    return frozenset(names)


def private_names_of_others(tree: ast.Module, ours: frozenset[str]) -> Iterator[str]:
    """The private names in `tree` that neither we define nor the standard library does."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and private(node.attr) and node.attr not in ours:
            root = ast.unparse(node).partition(".")[0]
            if root not in sys.stdlib_module_names:
                yield ast.unparse(node)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] not in sys.stdlib_module_names:
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            yield from (part for part in parts if private(part) and part not in ours)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr", "delattr"):
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
            if private(name) and name not in ours:
                yield name


def test_private_names_of_libraries_are_used_in_compat_only():
    tree = ast.parse(
        "from torch._utils import flatten\nfrom datasets import _private\ntorch._foreach_mul_(x)\n"
        "model._marked = True\ngetattr(model, '_hidden')\nself._ours\nos._exit(1)\nmodel.__dict__\n"
    )
    found = {"_utils", "_private", "torch._foreach_mul_", "model._marked", "_hidden"}
    assert set(private_names_of_others(tree, frozenset({"_ours"}))) == found
    used = {module_name(path) for path in TOOLKIT if set(private_names_of_others(parsed(path), our_private_names()))}
    assert all(name.endswith(".compat") for name in used), used


def test_every_recipe_has_a_debug_preset_and_is_tested():
    tests = [path.read_text() for path in (ROOT / "tests" / "recipes").rglob("test_*.py")]
    for path in sorted((ROOT / "recipes").glob("*.py")):
        assert any(isinstance(node, ast.FunctionDef) and node.name == "debug" for node in parsed(path).body), path
        assert any(path.stem in test for test in tests), f"no test runs {path.name}"
