"""Who may import whom, how large things may be, and what every recipe has. No file is excepted."""

from __future__ import annotations

import ast
import functools
import io
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.helpers import ROOT

TOOLKIT = sorted((ROOT / "toolkit").rglob("*.py"))
RECIPES = sorted((ROOT / "recipes").glob("*.py"))

FLOORS = """
toolkit.__main__
toolkit.commands
toolkit
toolkit.train  toolkit.commands.doctor
toolkit.experts.hosts  toolkit.commands.lab  toolkit.domains  toolkit.commands.report
toolkit.train.models  toolkit.train.tasks
toolkit.experts.dynamic
toolkit.experts
toolkit.train.trainer
toolkit.train.callbacks
toolkit.commands.sweep  toolkit.train.batch_size  toolkit.train.finite_check
toolkit.checkpoint
toolkit.run
toolkit.run.pictures
toolkit.experts.placement
toolkit.data
toolkit.run.tracking
toolkit.train.optim
toolkit.experts.parallel
toolkit.run.cli
toolkit.run.launch
toolkit.run.config
toolkit.experts.layer.replan_options  toolkit.experts.layer.router_options  toolkit.experts.dynamic.lifecycle_options
toolkit.optimizer_options  toolkit.experts.hosts.peft.adapter_options
toolkit.experts.parallel.parallel_options  toolkit.train.callbacks.callback_options
toolkit.experts.placement.placement_options
toolkit.experts.options
toolkit.train.metrics  toolkit.train.task  toolkit.train.state  toolkit.experts.parallel.seeding  toolkit.version  toolkit.compat
toolkit.errors
"""
"""Packages and modules from top to bottom. Each imports from the floors below it only: not above, not beside."""

FENCES = {
    "tyro": ("toolkit.run.cli",),
    "wandb": (),
    "accelerate": (
        "toolkit.compat",
        "toolkit.run.run",
        "toolkit.run.accelerator",
        "toolkit.run.provenance",
        "toolkit.experts.parallel",
        "toolkit.run.tracking.trackers",
        "toolkit.data.batches",
        "toolkit.data.loader",
        "toolkit.commands.doctor",
        "toolkit.experts.hosts.loop.engine",
        "toolkit.experts.hosts.loop.prepare_arguments",
    ),
    "transformers": ("toolkit.compat", "toolkit.experts.hosts.transformers", "toolkit.data.tokenizer"),
    "peft": ("toolkit.experts.hosts.peft",),
    "matplotlib": ("toolkit.run.pictures", "toolkit.domains", "toolkit.run.tracking.trackers"),
    "bokeh": ("toolkit.commands.report",),
    "wandb_workspaces": ("toolkit.commands.report.workspace",),
    "ray": ("toolkit.commands.ray.ray_train",),
    "fsspec": ("toolkit.run.storage",),
    "datasets": ("toolkit.data", "toolkit.domains"),
    "pickle": (),
    "cloudpickle": (),
    "dill": (),
    "marshal": (),
    "shelve": (),
    "joblib": (),
}
"""A library -> where it may be imported."""
ONLY_INSIDE_FUNCTIONS = {"matplotlib", "bokeh", "wandb_workspaces", "datasets", "transformers", "ray"}
PICKLING_CALLS = {("torch", "load"), ("torch", "save")}
MOST_MODULES_AT_THE_ROOT, MOST_MODULES_IN_A_FOLDER, MOST_LINES_OF_A_FILE = 16, 18, 350


# --- reading imports -------------------------------------------------------------------------------------------------


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


def home(module: str, name: str | None, files: dict[str, Path]) -> str:
    """The module that `name` comes from, through any package that only passes it on."""
    if name is None:
        return module
    if f"{module}.{name}" in files:
        return f"{module}.{name}"
    for found in imports(files[module]) if module in files else ():
        if found.name == name and found.module in files:
            return home(found.module, name, files)
    return module


def modules_imported(path: Path, files: dict[str, Path], *, for_types: bool) -> set[str]:
    """The modules among `files` that `path` imports: those that it names, and the homes of the names that it takes."""
    named = set()
    for found in imports(path):
        if for_types or not found.for_types:
            is_module = f"{found.module}.{found.name}" in files
            named |= {home(found.module, found.name, files)} | (set() if is_module else {found.module})
    if not for_types:
        # Modules that are imported by their name at run time, as sub-commands are.
        texts = {node.value for node in ast.walk(parsed(path)) if isinstance(node, ast.Constant)}
        named |= {text for text in texts if isinstance(text, str) and "." in text}
    return {module for module in named if module in files and module != module_name(path)}


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


ROOMS = [line.split() for line in FLOORS.split("\n") if line]
FILES = {module_name(path): path for path in TOOLKIT}


def floor_and_room(module: str) -> tuple[int, str]:
    """The floor of `module`, counted from the top, and its room: the innermost where rooms contain each other."""
    rooms = [(len(room), number, room) for number, floor in enumerate(ROOMS) for room in floor if within(module, room)]
    _, number, room = max(rooms)
    assert (room == "toolkit") == (module == "toolkit"), f"{module} is in no room: name it in FLOORS"
    return number, room


# --- the tests of this file's own reading ----------------------------------------------------------------------------


def test_imports_are_found_wherever_they_hide_and_followed_home(tmp_path: Path):
    sources = {
        "module": "import a.b\nfrom package import passed_on, submodule\nif TYPE_CHECKING:\n    import types_only\n"
        "try:\n    import tried\nexcept ImportError:\n    pass\ndef f():\n    import late\n",
        "package": "from origin import passed_on\n",
        "origin": "passed_on = 1\n",
        "package.submodule": "",
    }
    files = {name: tmp_path / f"{name}.py" for name in sources}
    for name, text in sources.items():
        files[name].write_text(text)
    found = {(found.module, found.when_imported, found.for_types) for found in imports(files["module"])}
    assert found == {
        ("a.b", True, False),
        ("package", True, False),
        ("types_only", False, True),
        ("tried", True, False),
        ("late", False, False),
    }
    assert home("package", "passed_on", files) == "origin"
    assert home("package", "submodule", files) == "package.submodule"
    assert home("package", "defined_there", files) == "package"


def test_every_module_has_a_floor_and_every_floor_a_module():
    assert {floor_and_room(module)[1] for module in FILES} == {room for floor in ROOMS for room in floor}


# --- the architecture ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", TOOLKIT, ids=module_name)
def test_a_module_imports_from_the_floors_below_it(path: Path):
    floor, room = floor_and_room(module_name(path))
    for imported in modules_imported(path, FILES, for_types=False):
        below, other = floor_and_room(imported)
        assert other == room or below > floor, f"{module_name(path)} ({room}) imports {imported} ({other})"


def test_rooms_form_no_circle_but_the_one_for_types():
    edges = set()
    for path in TOOLKIT:
        floor, room = floor_and_room(module_name(path))
        for imported in modules_imported(path, FILES, for_types=True):
            other_floor, other = floor_and_room(imported)
            if other != room and other_floor <= floor:
                edges.add((room, other))
    # Callbacks are annotated with the trainer that calls them.
    assert edges == {("toolkit.train.callbacks", "toolkit.train.trainer")}


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


def test_nothing_of_ours_imports_recipes_tests_or_benchmarks_and_recipes_only_the_toolkit():
    for path in [*TOOLKIT, *RECIPES]:
        for found in imports(path):
            assert found.module.partition(".")[0] not in ("recipes", "tests", "benchmarks"), module_name(path)
    for path in TOOLKIT:
        whole = [found for found in imports(path) if (found.module, found.name) == ("toolkit", None)]
        assert not whole, f"{module_name(path)}: `import toolkit` hides who imports whom"


@pytest.mark.parametrize("path", [*TOOLKIT, *RECIPES], ids=module_name)
def test_a_library_is_imported_only_behind_its_fence(path: Path):
    name = module_name(path)
    for found in imports(path):
        library = found.module.partition(".")[0]
        if library in FENCES and not found.for_types:
            assert any(within(name, place) for place in FENCES[library]), f"{name} imports {found.module}"
        at_import = found.when_imported and library in ONLY_INSIDE_FUNCTIONS
        assert not at_import, f"{name} imports {found.module} outside a function"


def test_fences_stand_around_modules_that_import_the_library():
    for library, places in FENCES.items():
        for place in places:
            inside = [path for name, path in FILES.items() if within(name, place)]
            used = any(found.module.partition(".")[0] == library for path in inside for found in imports(path))
            assert used, f"{place} does not import {library}"


@pytest.mark.parametrize("path", TOOLKIT, ids=module_name)
def test_nothing_is_read_or_written_as_pickle(path: Path):
    for node in ast.walk(parsed(path)):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
            assert (node.func.value.id, node.func.attr) not in PICKLING_CALLS
        for keyword in node.keywords:
            value = keyword.value.value if isinstance(keyword.value, ast.Constant) else "computed"
            assert keyword.arg != "weights_only"
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


def test_private_names_of_libraries_are_told_from_ours():
    tree = ast.parse(
        "from torch._utils import flatten\nfrom datasets import _private\ntorch._foreach_mul_(x)\n"
        "model._marked = True\ngetattr(model, '_hidden')\nself._ours\nos._exit(1)\nmodel.__dict__\n"
    )
    found = {"_utils", "_private", "torch._foreach_mul_", "model._marked", "_hidden"}
    assert set(private_names_of_others(tree, frozenset({"_ours"}))) == found


def test_private_names_of_libraries_are_used_in_compat_only():
    used = {module_name(path) for path in TOOLKIT if set(private_names_of_others(parsed(path), our_private_names()))}
    assert used == {"toolkit.compat"}


# --- sizes -----------------------------------------------------------------------------------------------------------


def test_no_folder_is_too_full_to_be_taken_in():
    for folder in {path.parent for path in TOOLKIT}:
        most = MOST_MODULES_AT_THE_ROOT if folder == ROOT / "toolkit" else MOST_MODULES_IN_A_FOLDER
        assert len(list(folder.glob("*.py"))) <= most, folder


@pytest.mark.parametrize("path", TOOLKIT, ids=module_name)
def test_no_file_is_too_long(path: Path):
    assert len(path.read_text().splitlines()) <= MOST_LINES_OF_A_FILE


def test_the_training_loop_stays_short():
    assert len((ROOT / "toolkit" / "train" / "trainer.py").read_text().splitlines()) <= 290


@pytest.mark.parametrize("path", [*TOOLKIT, *RECIPES], ids=module_name)
def test_a_line_holds_one_statement(path: Path):
    semicolons = [
        token.start[0]
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
        if token.type == tokenize.OP and token.string == ";"
    ]
    assert not semicolons, f"{path}: lines {semicolons}"


@pytest.mark.parametrize("path", RECIPES, ids=module_name)
def test_a_recipe_is_short_has_a_debug_preset_and_is_tested(path: Path):
    assert len(path.read_text().splitlines()) <= 120
    assert any(isinstance(node, ast.FunctionDef) and node.name == "debug" for node in parsed(path).body)
    tests = [test for test in (ROOT / "tests").rglob("test_*.py") if test != Path(__file__)]
    assert any(path.stem in test.read_text() for test in tests), f"no test runs {path.name}"


def test_there_are_recipes():
    assert RECIPES
