"""Who may import whom, and what every recipe has. No file is excepted."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import ROOT

TOOLKIT = sorted((ROOT / "toolkit").rglob("*.py"))
RECIPES = sorted((ROOT / "recipes").glob("*.py"))

# Package or module of ours -> what it never imports.
FORBIDDEN = {
    "toolkit.trainer": ("toolkit.moe", "toolkit.models", "toolkit.tasks"),
    "toolkit.moe": ("toolkit.trainer", "toolkit.run.run", "toolkit.data", "toolkit.models", "toolkit.tasks"),
    "toolkit.models": ("toolkit.data", "toolkit.trainer", "toolkit.run.run", "toolkit.tasks"),
    "toolkit.data": ("toolkit.moe", "toolkit.models", "toolkit.trainer", "toolkit.run.run", "toolkit.tasks"),
    "toolkit.tasks": ("toolkit.moe", "toolkit.models", "toolkit.data", "toolkit.trainer", "toolkit.run.run"),
    "toolkit.parallel.ownership": ("toolkit.moe", "toolkit.trainer", "toolkit.run.run"),
    "toolkit.callbacks": ("toolkit.moe", "toolkit.models", "toolkit.trainer"),
    "toolkit": ("recipes", "tests", "benchmarks"),
    "recipes": ("recipes", "tests", "benchmarks"),
}
LEAVES = {
    "toolkit.errors",
    "toolkit.version",
    "toolkit.state",
    "toolkit.schedules",
    "toolkit.seeding",
    "toolkit.metrics",
}
"""Modules that import nothing of ours but each other."""

# Package of others -> where it may be imported.
FENCES = {
    "tyro": ("toolkit.cli",),
    "wandb": (),
    "accelerate": (
        "toolkit.run.run",
        "toolkit.trainer",
        "toolkit.parallel.ownership",
        "toolkit.checkpoint.checkpoint",
        "toolkit.tracking",
        "toolkit.data.batches",
        "toolkit.launch",
        "toolkit.doctor",
        "toolkit.parallel.fsdp",
        "toolkit.hosts.engine",
    ),
    "transformers": ("toolkit.hosts.transformers", "toolkit.data.tokenizer"),
    "matplotlib": ("toolkit.tracking",),
    "datasets": ("toolkit.data",),
    "pickle": (),
    "cloudpickle": (),
    "dill": (),
    "marshal": (),
    "shelve": (),
    "joblib": (),
}
ONLY_INSIDE_FUNCTIONS = {"matplotlib", "datasets", "transformers"}
PICKLING_CALLS = {("torch", "load"), ("torch", "save")}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Every module that `path` imports when it runs, and whether it does so when it is itself imported."""

    def visit(node: ast.AST, at_import: bool) -> Iterator[tuple[str, bool]]:
        if isinstance(node, ast.Import):
            yield from ((alias.name, at_import) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide who imports whom"
            # `from toolkit import parallel` imports a module, `from toolkit.run.run import Run` a name: both are covered.
            yield node.module or "", at_import
            yield from ((f"{node.module}.{alias.name}", at_import) for alias in node.names)
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for child in node.orelse:
                yield from visit(child, at_import)
        else:
            inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            for child in ast.iter_child_nodes(node):
                yield from visit(child, at_import and not inside)

    return visit(parsed(path), True)


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def test_imports_are_found_wherever_they_hide(tmp_path: Path):
    file = tmp_path / "module.py"
    file.write_text(
        "import a.b\nfrom toolkit import moe\nif TYPE_CHECKING:\n    import seen_by_mypy_only\n"
        "try:\n    import tried\nexcept ImportError:\n    pass\ndef f():\n    import late\n"
    )
    assert set(imports(file)) == {
        ("a.b", True),
        ("toolkit", True),
        ("toolkit.moe", True),
        ("tried", True),
        ("late", False),
    }


@pytest.mark.parametrize("path", [*TOOLKIT, *RECIPES], ids=module_name)
def test_a_module_imports_only_what_its_place_allows(path: Path):
    name = module_name(path)
    for imported, _ in imports(path):
        for place, forbidden in FORBIDDEN.items():
            if within(name, place):
                assert not any(within(imported, other) for other in forbidden), f"{name} imports {imported}"
        if name in LEAVES:
            assert (
                not within(imported, "toolkit")
                or imported == "toolkit"
                or any(within(imported, leaf) for leaf in LEAVES)
            ), f"{name} imports {imported}"


@pytest.mark.parametrize("path", [*TOOLKIT, *RECIPES], ids=module_name)
def test_a_library_is_imported_only_behind_its_fence(path: Path):
    name = module_name(path)
    for imported, at_import in imports(path):
        library = imported.partition(".")[0]
        if library in FENCES:
            assert any(within(name, place) for place in FENCES[library]), f"{name} imports {imported}"
        assert not (at_import and library in ONLY_INSIDE_FUNCTIONS), f"{name} imports {imported} outside a function"


def test_the_rules_speak_of_modules_that_exist():
    names = {module_name(path) for path in [*TOOLKIT, *RECIPES]} | {"recipes", "tests", "benchmarks"}
    planned = {"toolkit.hosts.transformers"}
    places = {*FORBIDDEN, *LEAVES, *(other for row in FORBIDDEN.values() for other in row)}
    places |= {place for row in FENCES.values() for place in row}
    assert places - planned <= names


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


@pytest.mark.parametrize("path", RECIPES, ids=module_name)
def test_a_recipe_is_short_has_a_debug_preset_and_is_tested(path: Path):
    assert len(path.read_text().splitlines()) <= 120
    assert any(isinstance(node, ast.FunctionDef) and node.name == "debug" for node in parsed(path).body)
    tests = [test for test in (ROOT / "tests").rglob("test_*.py") if test != Path(__file__)]
    assert any(path.stem in test.read_text() for test in tests), f"no test runs {path.name}"


def test_there_are_recipes():
    assert RECIPES


def test_the_loop_can_be_read_standing_up():
    assert len((ROOT / "toolkit" / "trainer.py").read_text().splitlines()) < 250


def test_importing_the_toolkit_loads_nothing_heavy():
    heavy = {"torch", "accelerate", "transformers", "datasets", "wandb", "numpy", "matplotlib", "tyro"}
    code = f"import sys, toolkit, toolkit.cli, toolkit.launch.world, toolkit.config.run; print(*{heavy!r} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_every_public_name_can_be_imported():
    code = "import toolkit; [getattr(toolkit, name) for name in toolkit.__all__]"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_the_public_names_that_types_see_are_those_that_programs_get():
    import toolkit

    tree = ast.parse((ROOT / "toolkit" / "__init__.py").read_text())
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        node.module: sorted(name.name for name in node.names)
        for node in ast.walk(guarded)
        if isinstance(node, ast.ImportFrom)
    }
    assert seen == {module: sorted(names) for module, names in toolkit._HOMES.items()}
    for name in toolkit.__all__:
        assert getattr(toolkit, name) is not None
