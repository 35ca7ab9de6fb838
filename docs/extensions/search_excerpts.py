"""Results of a search have excerpts also where the site is opened from a disk.

Sphinx's search fetches each page that it has found, which browsers refuse for files. So the search page loads the text
of all pages as a script, and takes them from there.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

SCRIPT = "search_texts.js"
NOT_TEXT = re.compile(r'<a class="headerlink".*?</a>|<(?!/?section\b)[^>]*>')
FETCH = 'if (location.protocol === "file:") window.fetch = async (url) => new Response(TEXTS[url]);'


def keep_text(app: Sphinx, page: str, _template: str, context: dict[str, Any], doctree: nodes.document | None) -> None:
    """Of each page what an excerpt can be of: words, in sections with their ids, to which results lead."""
    texts: dict[str, str] = app.env.texts
    if doctree:
        words = " ".join(NOT_TEXT.sub("", context["body"]).split())
        texts[f"./{page}.html"] = f'<div role="main">{words}</div>'
    elif page == "search":  # which is written last
        (Path(app.outdir) / "_static" / SCRIPT).write_text(f"const TEXTS = {json.dumps(texts)};\n{FETCH}\n")
        app.add_js_file(SCRIPT)


def begin(app: Sphinx) -> None:
    app.env.texts = {}


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("builder-inited", begin)
    app.connect("html-page-context", keep_text)
    return {"parallel_write_safe": False}
