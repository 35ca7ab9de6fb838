"""Docstrings are Markdown, as their authors write them: `code` in single backticks, indented blocks as they stand.

autodoc takes docstrings for reStructuredText. Each is wrapped in a directive `markdown`, which gives its content to the
parser of the pages.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

from docutils import nodes
from myst_parser.mdit_to_docutils.sphinx_ import SphinxRenderer
from myst_parser.parsers.mdit import create_md_parser
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective


class Markdown(SphinxDirective):
    """Its content, read as Markdown."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        content = nodes.Element()
        parser = create_md_parser(self.env.myst_config, SphinxRenderer)
        parser.disable(["html_inline", "html_block"])  # <name> is text
        parser.disable("wordcount")  # which stands once in a page
        parser.options["document"] = self.state.document
        parser.options["current_node"] = content
        parser.render("\n".join(self.content))
        return content.children


def wrap(_app: Sphinx, _what: str, _name: str, _value: Any, _options: Any, lines: list[str]) -> None:
    if any(lines):
        lines[:] = [".. markdown::", "", *(f"   {line}" for line in lines), ""]


def shorten(
    _app: Sphinx, what: str, _name: str, value: Any, _options: Any, _signature: str | None, _returns: str | None
) -> tuple[str, None] | None:
    """A dataclass's fields stand below it with types, defaults and docstrings; its signature need not repeat them."""
    return ("(...)", None) if what == "class" and is_dataclass(value) and fields(value) else None


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("markdown", Markdown)
    app.connect("autodoc-process-docstring", wrap)
    app.connect("autodoc-process-signature", shorten)
    return {"parallel_read_safe": True}
