"""Import rules of the packages. No file is excepted."""

import ast
import functools
import graphlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.support.processes import ROOT

TOOLKIT = sorted((ROOT / "toolkit").rglob("*.py"))
RECIPES = sorted((ROOT / "recipes").rglob("*.py"))

LAYERS = """
toolkit.__main__
toolkit.commands  toolkit
toolkit.audit  toolkit.doctor  toolkit.lab
toolkit.dynamic
toolkit.train
toolkit.integrations.peft
toolkit.integrations.transformers
toolkit.checkpoint
toolkit.run
toolkit.data
toolkit.integrations.accelerate
toolkit.integrations
toolkit.experts
toolkit.experts.moving
toolkit.experts.sharding
toolkit.experts.routing
toolkit.experts.state
toolkit.experts.layer
toolkit.progress_bar
toolkit.experts.parallel
toolkit.experts.placement
toolkit.experts.compat  toolkit.experts.options
toolkit.compat  toolkit.torch_files  toolkit.version
toolkit.errors  toolkit.public_names
"""
"""Packages and modules from top to bottom. Each imports from lower layers only, also for type checkers."""

IMPORTERS = {
    "tyro": ("toolkit.run.cli",),
    "wandb": (),
    "accelerate": ("toolkit.run", "toolkit.data", "toolkit.doctor", "toolkit.integrations.accelerate"),
    "transformers": ("toolkit.integrations.transformers", "toolkit.data.tokenizer"),
    "peft": ("toolkit.integrations.peft",),
    "matplotlib": ("toolkit.run.pictures", "toolkit.dynamic"),
    "bokeh": ("toolkit.commands.report",),
    "wandb_workspaces": ("toolkit.commands.report",),
    "tqdm": ("toolkit.progress_bar", "toolkit.train.callbacks.progress"),
    "fsspec": ("toolkit.run",),
    "datasets": ("toolkit.data",),
    "pickle": ("toolkit.audit.distributed_checkpoint",),
    **dict.fromkeys(("cloudpickle", "dill", "marshal", "shelve", "joblib"), ()),
}
"""Packages of `toolkit/` that import a library."""
ONLY_INSIDE_FUNCTIONS = {"matplotlib", "bokeh", "wandb_workspaces", "datasets", "transformers"}
LIBRARIES_OF_EXPERTS = {"torch", "numpy", "pydantic", "safetensors", "toolkit"}
KNOW_FLAGS = tuple(f"toolkit.{name}" for name in ("commands", "audit", "doctor", "lab", "train", "run", "errors"))
PICKLING_CALLS = {("torch", "load"), ("torch", "save")}


class Import(NamedTuple):
    """An import statement anywhere in a file."""

    module: str
    name: str | None
    """Name after `from module import`, or None for `import module`."""
    at_import: bool
    """True outside functions."""
    for_types: bool
    """True under TYPE_CHECKING."""

    @property
    def library(self) -> str:
        return self.module.partition(".")[0]


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
            assert node.level == 0, f"{path}: relative import"
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


def imported_modules(path: Path, *, for_types: bool) -> set[str]:
    """Return the modules of the toolkit that `path` imports, at run time also by their names in strings."""
    named = set()
    for found in imports(path):
        if for_types or not found.for_types:
            submodule = f"{found.module}.{found.name}"
            named.add(submodule if submodule in MODULES else found.module)
    if not for_types:
        texts = (node.value for node in ast.walk(parsed(path)) if isinstance(node, ast.Constant))
        named |= {text for text in texts if isinstance(text, str) and "." in text}
    return {module for module in named if module in MODULES and module != module_name(path)}


def within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


MODULES = {module_name(path): path for path in TOOLKIT}
LAYER_OF = {package: number for number, line in enumerate(LAYERS.split("\n")) for package in line.split()}


def package_of(module: str) -> str:
    """Return the innermost package of LAYERS that contains `module`."""
    package = max((package for package in LAYER_OF if within(module, package)), key=len)
    assert (package == "toolkit") == (module == "toolkit"), f"{module} is in no package of LAYERS"
    return package


def test_every_package_of_layers_has_a_module():
    assert {package_of(module) for module in MODULES} == LAYER_OF.keys()


def test_imports_point_to_lower_layers():
    upward = []
    for name, path in MODULES.items():
        package = package_of(name)
        for imported in sorted(imported_modules(path, for_types=True)):
            other = package_of(imported)
            if other != package and LAYER_OF[other] <= LAYER_OF[package]:
                upward.append(f"{name} ({package}) imports {imported} ({other})")
    assert not upward, "\n".join(upward)


def test_modules_have_no_import_cycle():
    graph = {name: imported_modules(path, for_types=False) for name, path in MODULES.items()}
    graphlib.TopologicalSorter(graph).prepare()


def test_subcommands_do_not_import_each_other():
    for name, path in MODULES.items():
        command = name.split(".")[2:3] if within(name, "toolkit.commands") else []
        for imported in imported_modules(path, for_types=True) if command else ():
            assert not within(imported, "toolkit.commands") or imported.split(".")[2:3] in ([], command), name


def test_toolkit_imports_no_recipe_and_recipes_import_no_tests():
    subjects = {path.name for path in (ROOT / "recipes").iterdir() if path.is_dir()}
    for path in [*TOOLKIT, *RECIPES]:
        forbidden = {"recipes", "tests", "benchmarks"} | (subjects if path in TOOLKIT else set())
        for found in imports(path):
            assert found.library not in forbidden, f"{module_name(path)} imports {found.module}"
            package = path in TOOLKIT and (found.module, found.name) == ("toolkit", None)
            assert not package, f"{module_name(path)}: `import toolkit` hides dependencies"


def test_recipes_import_the_public_api_of_the_toolkit():
    for path in RECIPES:
        for found in imports(path):
            public = found.library != "toolkit" or found.module in ("toolkit", "toolkit.experts")
            assert public, f"{module_name(path)} imports {found.module}"


def test_libraries_are_imported_only_by_their_importers():
    wrong = []
    for name, path in MODULES.items():
        for found in imports(path):
            if found.library in IMPORTERS and not found.for_types and not within(name, *IMPORTERS[found.library]):
                wrong.append(f"{name} imports {found.module}")
            if found.at_import and found.library in ONLY_INSIDE_FUNCTIONS:
                wrong.append(f"{name} imports {found.module} outside a function")
    for library, packages in IMPORTERS.items():
        for package in packages:
            inside = [path for name, path in MODULES.items() if within(name, package)]
            if not any(found.library == library for path in inside for found in imports(path)):
                wrong.append(f"{package} does not import {library}: remove it from IMPORTERS")
    assert not wrong, "\n".join(wrong)


def test_experts_import_only_torch_and_small_libraries():
    for name, path in MODULES.items():
        for found in imports(path) if within(name, "toolkit.experts") else ():
            known = LIBRARIES_OF_EXPERTS | sys.stdlib_module_names | ({"jaxtyping"} if found.for_types else set())
            assert found.library in known, f"{name} imports {found.module}"


def test_only_command_line_packages_mention_flags():
    for name, path in MODULES.items():
        if not within(name, *KNOW_FLAGS) and name != "toolkit":
            assert re.findall(r"(?<![\w\-<!|:])--[a-z][\w.-]*", path.read_text()) == [], name


def test_messages_name_only_files_of_the_package():
    for path in TOOLKIT:
        docstrings = {node.value for node in ast.walk(parsed(path)) if isinstance(node, ast.Expr)}
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
                found = re.search(r"\b(docs|recipes|tests|benchmarks|accelerate_configs)/\w", node.value)
                assert found is None, f"{path}:{node.lineno}: {node.value}"


def test_files_are_not_read_or_written_as_pickle():
    for path in TOOLKIT:
        for node in ast.walk(parsed(path)):
            if not isinstance(node, ast.Call):
                continue
            if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
                if path.name == "torch_files.py" and ast.unparse(node).endswith("mmap=True, weights_only=True)"):
                    continue  # files of other programs
                assert (node.func.value.id, node.func.attr) not in PICKLING_CALLS, path
            for keyword in node.keywords:
                value = keyword.value.value if isinstance(keyword.value, ast.Constant) else "computed"
                assert keyword.arg != "weights_only", path
                assert keyword.arg != "allow_pickle" or value is False, f"{path}: allow_pickle={value}"


def private_names_of_toolkit() -> set[str]:
    """Return the names of functions, classes, attributes of `self`, and fields that `toolkit/` defines."""
    names: set[str] = set()
    for path in TOOLKIT:
        for node in ast.walk(parsed(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names |= {node.attr} if ast.unparse(node.value) in ("self", "cls") else set()
    return names


def private_names_of_libraries(tree: ast.Module, defined: set[str]) -> Iterator[str]:
    """Yield the private names in `tree` that neither `defined` nor the standard library has."""
    for node in ast.walk(tree):
        library, names = "", []
        if isinstance(node, ast.Attribute):
            library, names = ast.unparse(node).partition(".")[0], [node.attr]
        elif isinstance(node, ast.ImportFrom):
            library = (node.module or "").partition(".")[0]
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr", "delattr"):
            names = [node.args[1].value] if isinstance(node.args[1], ast.Constant) else []
        if library not in sys.stdlib_module_names:
            yield from (n for n in names if n.startswith("_") and not n.startswith("__") and n not in defined)


def test_only_compat_modules_use_private_names_of_libraries():
    defined = private_names_of_toolkit()
    used = {module_name(path) for path in TOOLKIT if any(private_names_of_libraries(parsed(path), defined))}
    assert used == {name for name in MODULES if name.endswith(".compat")}


def test_every_recipe_has_a_debug_preset_and_a_test():
    tests = [path.read_text() for path in (ROOT / "tests" / "recipes").rglob("test_*.py")]
    for path in sorted((ROOT / "recipes").glob("*.py")):
        assert any(isinstance(node, ast.FunctionDef) and node.name == "debug" for node in parsed(path).body), path
        assert any(path.stem in test for test in tests), f"no test runs {path.name}"
