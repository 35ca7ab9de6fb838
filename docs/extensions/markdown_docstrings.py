"""Docstrings are Markdown, as their authors write them: `code` in single backticks, indented blocks as they stand.

autodoc takes docstrings for reStructuredText. Each is wrapped in a directive `markdown`, which gives its content to the
parser of the pages. What stands below `Args:` and its like becomes a list.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from docutils import nodes
from myst_parser.mdit_to_docutils.sphinx_ import SphinxRenderer
from myst_parser.parsers.mdit import create_md_parser
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

LISTS = {"Args:": True, "Raises:": True, "Returns:": False, "Yields:": False}
"""Headings of docstrings, and whether each entry below one begins with a name."""


def with_lists(lines: list[str]) -> Iterator[str]:
    """The lines, with a Markdown list in place of what is indented below a heading."""
    heading = ""
    for line in lines:
        if line in LISTS:
            heading = line
            yield from (f"**{line[:-1]}**", "")
            continue
        heading = heading if not line or line.startswith(" ") else ""
        named = re.match(r"    (\S+): ", line)
        if not heading:
            yield line
        elif LISTS[heading] and named:
            yield f"- `{named[1]}`: {line[named.end() :]}"
        else:
            yield ("  " if line and LISTS[heading] else "") + line.strip()


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
        lines[:] = [".. markdown::", "", *(f"   {line}" for line in with_lists(lines)), ""]


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
