"""Runs a notebook as IPython would, where there is no IPython: `python notebook.py FILE` in the folder that it is for.

The cells run one after another in one namespace. `%%writefile NAME` writes the rest of its cell; a shell runs what
begins with `!`. Here a command that fails ends the program, where IPython would go on. `%pip` is an error, as
everything is installed, and so are other magics. At the end, what JSON can hold of the namespace is written to
values.json, with the pictures that were shown.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

LINES = re.compile(r"^(?P<indent>[ \t]*)(?P<mark>[!%])(?P<rest>(?:[^\n]*\\\n)*[^\n]*)$", re.MULTILINE)
PNG = b"\x89PNG\r\n"


def code_of(cell: str) -> str:
    """What Python runs of a cell."""
    if cell.startswith("%%writefile "):
        first, _, text = cell.partition("\n")
        return f"_write({first.split()[1]!r}, {text!r})"

    def call(line: re.Match[str]) -> str:
        words = line["rest"].replace("\\\n", " ")
        return f"{line['indent']}{'_shell' if line['mark'] == '!' else '_magic'}({words!r})"

    return LINES.sub(call, cell)


def write(name: str, text: str) -> None:
    Path(name).write_text(text)


def shell(command: str) -> None:
    sys.stdout.flush()
    code = subprocess.run(command, shell=True).returncode
    if code:
        raise AssertionError(f"exit code {code}: {command}")


def magic(words: str) -> None:
    raise AssertionError(f"%{words}: not to be run here")


def run(notebook: Path) -> None:
    pictures: list[str] = []

    def image(name: str) -> None:
        assert Path(name).read_bytes().startswith(PNG), name
        pictures.append(name)

    library, display = types.ModuleType("IPython"), types.ModuleType("IPython.display")
    vars(library).update(display=display, get_ipython=lambda: None, version_info=(9, 0))  # matplotlib asks
    vars(display).update(Image=image)
    sys.modules |= {"IPython": library, "IPython.display": display}
    sys.path.insert(0, os.getcwd())
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    names: dict[str, Any] = vars(main)
    names |= {"_write": write, "_shell": shell, "_magic": magic}
    for cell in json.loads(notebook.read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec(compile(code_of("".join(cell["source"])), f"<cell {cell['id']}>", "exec", dont_inherit=True), names)
    values = {"pictures": pictures}
    for name, value in names.items():
        try:
            values[name] = json.loads(json.dumps(value))
        except (TypeError, ValueError):
            continue
    Path("values.json").write_text(json.dumps(values))


if __name__ == "__main__":
    run(Path(sys.argv[1]))
