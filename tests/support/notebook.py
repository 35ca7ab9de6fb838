"""Runs a notebook without IPython: `python notebook.py FILE` in an empty folder.

`--store` writes the cells' text and figures to FILE (`make notebooks`).

The cells run one after another in one namespace. `%%writefile NAME` writes the rest of its cell; a shell runs lines
that begin with `!`. Unlike in IPython, a command that fails ends the program. `%pip` raises, as everything is
installed, and other magics, too. At the end, the JSON-serialisable part of the namespace is written to values.json,
with the outputs of each cell.
"""

from __future__ import annotations

import base64
import io
import json
import os
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image as Picture

LINES = re.compile(r"^(?P<indent>[ \t]*)(?P<mark>[!%])(?P<rest>(?:[^\n]*\\\n)*[^\n]*)$", re.MULTILINE)
PNG = b"\x89PNG\r\n"


def code_of(cell: str) -> str:
    """Return a cell's Python code."""
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


@contextmanager
def printed() -> Iterator[list[str]]:
    """Collect printed lines of this process and its children, without the path of the folder."""
    lines: list[str] = []
    whole = os.dup(1)
    with open("printed.txt", "w+") as file:
        sys.stdout.flush()
        os.dup2(file.fileno(), 1)
        try:
            yield lines
        finally:
            sys.stdout.flush()
            os.dup2(whole, 1)
            os.close(whole)
            file.seek(0)
            lines += file.read().replace(f"{os.getcwd()}/", "").splitlines(keepends=True)
            sys.stdout.write("".join(lines))


def shown(picture: bytes) -> dict[str, Any]:
    """Return a cell's output for a figure, in 64 colours: a third of the bytes."""
    assert picture.startswith(PNG)
    smaller = io.BytesIO()
    Picture.open(io.BytesIO(picture)).convert("RGB").quantize(64).save(smaller, "png", optimize=True)
    data = {"image/png": base64.b64encode(smaller.getvalue()).decode()}
    return {"output_type": "display_data", "data": data, "metadata": {}}


def drawn() -> Iterator[bytes]:
    """Yield a cell's open matplotlib figures, as PNG."""
    pyplot: Any = sys.modules.get("matplotlib.pyplot")
    for number in pyplot.get_fignums() if pyplot else ():
        picture = io.BytesIO()
        FigureCanvasAgg(pyplot.figure(number)).print_png(picture)
        pyplot.close(number)
        yield picture.getvalue()


def run(notebook: Path, store: bool) -> None:
    read = json.loads(notebook.read_text())
    pictures: list[bytes] = []
    library, display = types.ModuleType("IPython"), types.ModuleType("IPython.display")
    vars(library).update(display=display, get_ipython=lambda: None, version_info=(9, 0))  # matplotlib asks
    vars(display).update(Image=lambda name: pictures.append(Path(name).read_bytes()))
    sys.modules |= {"IPython": library, "IPython.display": display}
    sys.path.insert(0, os.getcwd())
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    names: dict[str, Any] = vars(main)
    names |= {"_write": write, "_shell": shell, "_magic": magic}
    cells = [cell for cell in read["cells"] if cell["cell_type"] == "code"]
    for cell in cells:
        code = compile(code_of("".join(cell["source"])), f"<cell {cell['id']}>", "exec", dont_inherit=True)
        with printed() as lines:
            exec(code, names)
        text = [{"output_type": "stream", "name": "stdout", "text": lines}] if lines else []
        cell["outputs"] = [*text, *map(shown, [*pictures, *drawn()])]
        pictures.clear()
    if store:
        notebook.write_text(json.dumps(read, indent=1, ensure_ascii=False) + "\n")
    values: dict[str, Any] = {"outputs": {cell["id"]: cell["outputs"] for cell in cells}}
    for name, value in names.items():
        try:
            values[name] = json.loads(json.dumps(value))
        except (TypeError, ValueError):
            continue
    Path("values.json").write_text(json.dumps(values))


if __name__ == "__main__":
    run(Path(sys.argv[1]), store="--store" in sys.argv[2:])
