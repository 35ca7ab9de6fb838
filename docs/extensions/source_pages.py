"""A page for each file of the repository that a page links to and that is no page itself, and for each documented name.

So `[trainer.py](../toolkit/train/trainer.py)` shows the file, with colours and line numbers, on the site as on a code
host. A link to a file or folder that does not exist is a warning, which the build turns into an error.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

from docutils import nodes
from pygments.lexers import get_lexer_for_filename
from pygments.util import ClassNotFound
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util import logging

LOGGER = logging.getLogger(__name__)


def page_of(path: str) -> str:
    """The page that shows the file `path`, which is counted from the repository's root."""
    return f"source/{path}"


def point_to_pages(app: Sphinx, document: nodes.document) -> None:
    """Replace links to files, and to Markdown that the site excludes, with links to the file's page."""
    here = app.env.docname
    links = [
        (link, app.env.relfn2path(link["reftarget"], here)[0]) for link in document.findall(addnodes.download_reference)
    ]
    for xref in document.findall(addnodes.pending_xref):
        if xref["refdomain"] == "doc" and xref["reftarget"] not in app.env.found_docs:
            links.append((xref, f"{xref['reftarget']}.md"))
    for link, path in links:
        if (Path(app.srcdir) / path).is_file():
            app.env.shown_files.add(path)
            uri = app.builder.get_relative_uri(here, page_of(path))
            link.replace_self(nodes.reference("", "", *link.children, refuri=uri, internal=True))
        else:
            LOGGER.warning("no such file: %s", link["reftarget"], location=link)


def point_to_lines(app: Sphinx, document: nodes.document) -> None:
    """Each documented name gets a link to the lines where it is defined."""
    for name in document.findall(addnodes.desc_signature):
        if name.get("module") and (place := where(app, name["module"], name["fullname"])):
            app.env.shown_files.add(place[0])
            uri = f"{app.builder.get_relative_uri(app.env.docname, page_of(place[0]))}#line-{place[1]}"
            text = nodes.inline("", "[source]", classes=["viewcode-link"])
            name += nodes.reference("", "", text, refuri=uri, internal=True)


def where(app: Sphinx, module: str, name: str) -> tuple[str, int] | None:
    """The file and line of a class or function of ours; None for other things, and for what a library defines."""
    try:
        value: Any = inspect.unwrap(reduce(getattr, name.split("."), importlib.import_module(module)))
        value = value.fget if isinstance(value, property) else value
        path = Path(inspect.getsourcefile(value) or "").relative_to(app.srcdir)
        return path.as_posix(), inspect.getsourcelines(value)[1]
    except (AttributeError, TypeError, ValueError, OSError):
        return None


def show_files(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    for path in sorted(app.env.shown_files):
        text = (Path(app.srcdir) / path).read_text()
        try:
            language = get_lexer_for_filename(path).aliases[0]
        except ClassNotFound:
            language = "none"
        code = app.builder.highlighter.highlight_block(
            text, language, force=True, linenos="inline", lineanchors="line", anchorlinenos=True
        )
        body = f'<div class="source-file"><h1>{path}</h1>{code}</div>'
        yield page_of(path), {"parents": [], "title": path, "body": body}, "page.html"


def begin(app: Sphinx) -> None:
    app.env.shown_files = set()


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("builder-inited", begin)
    app.connect("doctree-read", point_to_pages, priority=100)  # before downloads are collected
    app.connect("doctree-read", point_to_lines)
    app.connect("html-collect-pages", show_files)
    return {"parallel_read_safe": False}
