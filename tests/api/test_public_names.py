"""Public names at run time and in the stub."""

import ast
import doctest
import re
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

import toolkit as tk
from benchmarks.support.processes import ROOT, program_environment

STUB = ast.parse((ROOT / "toolkit" / "__init__.pyi").read_text())
PACKAGES = ("toolkit", "toolkit.experts", "toolkit.data", "toolkit.dynamic", "toolkit.integrations.transformers")
HEAVY = {"torch", "accelerate", "transformers", "datasets", "wandb", "numpy", "matplotlib", "tyro", "scipy", "networkx"}
UNTYPED_HERE = (
    "torch accelerate transformers datasets numpy matplotlib networkx scipy sklearn tqdm psutil PIL tyro filelock"
)
"""Libraries that mypy skips, because checking torch takes minutes."""
TYPED = (
    "docs/examples/own_loop.py docs/examples/text_classification.py recipes/mnist_moe.py recipes/lmu_speech.py "
    "recipes/speech/ctc.py recipes/speech/transcripts.py"
)
"""Scripts of users: loops by hand and by `fit`, and recipes with a task, callbacks and experts."""
MISUSE = """
import toolkit as tk
tk.start_run("name")  # no config
tk.RunConfig(batch_size="many")
tk.no_such_name
tk.transformers.no_such_name
class Wrong(tk.Callback):
    def on_step_end(self, trainer: int) -> None: ...
"""


def listed() -> list[str]:
    return [name.asname or name.name for node in STUB.body if isinstance(node, ast.ImportFrom) for name in node.names]


def test_stub_reexports_each_name_once():
    assert len(set(listed())) == len(listed())
    for node in STUB.body[1:]:
        assert isinstance(node, ast.ImportFrom)
        assert node.level == 1
        assert all(name.asname == name.name for name in node.names), "`import x as x` is a re-export"


def test_public_names_match_the_stub():
    assert sorted(tk.__all__) == sorted(listed())
    assert all(hasattr(tk, name) for name in tk.__all__)


def test_pages_import_from_packages_with_a_stub():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "docs" / "examples").glob("*.py")]
    imports = re.findall(r"^ *from (toolkit[\w.]*) import ([\w, ]+)", "\n".join(p.read_text() for p in pages), re.M)
    assert len(imports) > 20
    for package, names in imports:
        assert (ROOT / package.replace(".", "/") / "__init__.pyi").exists(), package
        assert set(names.split(", ")) <= set(import_module(package).__all__), (package, names)


@pytest.mark.parametrize("stub", sorted((ROOT / "toolkit").rglob("__init__.pyi")), ids=lambda stub: stub.parent.name)
def test_no_function_has_the_name_of_its_module(stub: Path):
    """Once the module was imported, it would stand in the function's place."""
    assert re.findall(r"^from \.(\w+) import \1 ", stub.read_text(), re.M) == []


class GivenOutput(doctest.OutputChecker):
    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return not want or super().check_output(want, got, optionflags)


def test_examples_that_begin_with_an_import_run(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    examples = {
        each.docstring: each
        for package in PACKAGES
        for name in import_module(package).__all__
        for each in doctest.DocTestFinder(recurse=False).find(getattr(import_module(package), name), name)
        if each.examples and "import" in each.examples[0].source
    }
    assert len(examples) > 10
    for example in examples.values():
        assert doctest.DocTestRunner(GivenOutput()).run(example).failed == 0, example.name


def test_name_of_another_package_raises_with_the_package():
    with pytest.raises(AttributeError, match=r"no attribute 'read_trace'\. Import it from toolkit\.experts$"):
        _ = tk.read_trace


def test_python_m_toolkit_help_loads_no_heavy_library():
    code = "import runpy, sys, toolkit.run.cli, toolkit.run.launch, toolkit.run.config.run; sys.exit = print; "
    code += f"sys.argv[1:] = ['--help']; runpy.run_module('toolkit'); print({HEAVY!r} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: toolkit COMMAND")
    assert done.stdout.endswith("\n0\nset()\n")


def test_commands_that_do_not_train_import_neither_dynamo_nor_dtensors():
    modules = "toolkit.audit.checks, toolkit.audit.convert, toolkit.commands.plan, toolkit.lab.command"
    heavy = {"accelerate", "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.tensor", "transformers"}
    code = f"import sys, {modules}; print({heavy!r} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT) == b"set()\n"


@pytest.mark.skipif(find_spec("mypy") is None, reason="mypy is a development dependency")
def test_mypy_strict_accepts_scripts_and_rejects_misuse(tmp_path: Path):
    misuse, settings = tmp_path / "misuse.py", tmp_path / "mypy.ini"
    misuse.write_text(MISUSE)
    untyped = ",".join(f"{library}.*" for library in UNTYPED_HERE.split())
    settings.write_text(f"[mypy]\n[mypy-{untyped}]\nfollow_imports = skip\n")
    options = ["--strict", "--allow-subclassing-any", "--follow-imports=silent", "--explicit-package-bases"]
    options += ["--cache-dir", str(tmp_path / "cache"), "--config-file", str(settings)]
    command = [sys.executable, "-m", "mypy", *options, *TYPED.split(), misuse]
    environment = program_environment(MYPYPATH="recipes")
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    errors = re.findall(r"(\w+)\.py:(\d+): error", done.stdout)
    wrong = [number for number, line in enumerate(MISUSE.splitlines(), start=1) if re.match(r"tk|    def", line)]
    assert sorted(set(errors)) == [("misuse", str(number)) for number in wrong], done.stdout + done.stderr
