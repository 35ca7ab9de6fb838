"""How `make docs` builds the site: the pages where they stand, and the reference from the docstrings.

The source folder is the repository's root, so links between pages lead to the same places on the site as on a code
host. Everything is read anew each time and every warning is an error: a dead link, a page that CONTENTS lacks, a public
name without a docstring.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs" / "extensions")]

# The table of contents: captions, and below each its pages in the order in which they are read.
CONTENTS = {
    "Get started": [f"docs/start/{name}" for name in ("install", "quickstart", "which_way", "research")],
    "Guides": [
        "docs/train/accelerate",
        "docs/experts/transformers",
        "docs/experts/torch_alone",
        "docs/experts/moe",
        "docs/experts/placement",
        "docs/experts/large_models",
        "docs/experts/adapters",
        "docs/experts/router_replay",
        "docs/experts/lifecycle",
        "docs/train/recipes",
        "docs/operate/checkpoints",
        "docs/operate/tracking",
        "docs/operate/audit",
        "docs/operate/doctor",
        "docs/operate/launchers",
    ],
    "Concepts": [f"docs/concepts/{name}" for name in ("expert_parallelism", "placement", "expert_gradients")],
    "Reference": [
        "docs/start/config",
        "docs/reference/metrics",
        "docs/reference/glossary",
        "docs/experts/transformers_families",
    ],
    "Recipes": ["recipes/README", *(f"docs/recipes/{name}" for name in ("language_model", "speech", "har", "vae"))],
    "Migration": [f"docs/start/migration/{name}" for name in ("README", "training", "vae", "har", "lmu", "morph")],
    "Project": [f"docs/project/{name}" for name in ("results", "parity", "related_work", "matrix", "stability")],
}

project = "toolkit"
html_title = "toolkit"
root_doc = "README"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "markdown_docstrings",
    "search_excerpts",
    "source_pages",
]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
exclude_patterns = [
    *("build", "runs", "tests", "**/.*", ".*", "**/site-packages"),
    # Pages for developers stay in the repository: links show their source, and the search has user pages only.
    *("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks", "toolkit/**", "accelerate_configs", "slurm"),
    *("docs/start/tour.md", "docs/project/notes", "docs/project/upstream"),
]

myst_heading_anchors = 4  # named as code hosts name them
highlight_language = "none"
smartquotes = False  # `--flag` keeps its dashes

autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_inherit_docstrings = False
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
add_module_names = False
# A reference to a name that is not documented is an error too, but for types in signatures: most are of torch and of
# Python, whose lists of names would have to come from the network.
nitpicky = True
nitpick_ignore_regex = [("py:class", ".*"), ("py:obj", r"typing\..*")]
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_static_path = ["static"]
html_search_scorer = str(ROOT / "docs" / "extensions" / "search_scorer.js")
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = html_show_sphinx = False
html_domain_indices = False
templates_path: list[str] = []


def write_reference(app: Sphinx, _config: object) -> None:
    """The pages of docs/api, and a warning, so an error, for each public name without a docstring."""
    from public_names import public_names, write_pages
    from sphinx.util import logging

    rooms = write_pages("toolkit", ROOT / "docs" / "api")
    app.config.contents = {**CONTENTS, "API reference": [f"docs/api/{room}" for room in rooms]}
    for public in public_names("toolkit"):
        if not public.doc:
            logging.getLogger(__name__).warning("%s has no docstring", public.home)


def add_contents(app: Sphinx, page: str, text: list[str]) -> None:
    """The table of contents belongs to the first page, and code hosts should not show it there."""
    if page == root_doc:
        for caption, pages in app.config.contents.items():
            lines = "\n".join(f"/{page}" for page in pages)
            text[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{lines}\n```\n"


def lead_to_first_page(app: Sphinx, error: Exception | None) -> None:
    if error is None:
        refresh = f'<!doctype html><meta http-equiv="refresh" content="0; url={root_doc}.html">'
        (Path(app.outdir) / "index.html").write_text(refresh)


def setup(app: Sphinx) -> None:
    app.connect("config-inited", write_reference)
    app.connect("source-read", add_contents)
    app.connect("build-finished", lead_to_first_page)
