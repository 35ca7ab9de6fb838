"""A notebook is a page: its words, its code in blocks, and below each block what it printed and drew."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from sphinx.application import Sphinx


def blocks(cells: list[dict[str, Any]]) -> Iterator[str]:
    """Markdown of each cell. A cell of commands is no Python."""
    for cell in cells:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            yield text
        else:
            yield f"```{'bash' if text.startswith('!') else 'python'}\n{text}\n```"
            yield from map(shown, cell["outputs"])


def shown(output: dict[str, Any]) -> str:
    if output["output_type"] == "stream":
        return f"```{{code-block}} none\n:class: output\n\n{''.join(output['text'])}\n```"
    return f"![what the code drew](data:image/png;base64,{output['data']['image/png']})"


def read_notebook(app: Sphinx, page: str, text: list[str]) -> None:
    if app.env.doc2path(page).suffix == ".ipynb":
        text[0] = "\n\n".join(blocks(json.loads(text[0])["cells"])) + "\n"


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", read_notebook)
    return {"parallel_read_safe": True}
