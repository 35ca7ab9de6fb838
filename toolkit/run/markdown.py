"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Sequence


def markdown_table(rows: Sequence[Sequence[str]], *, aligned: bool = False) -> str:
    """Return a Markdown table from a header and rows; `aligned` pads the columns for a terminal.

    A `|` in a cell is escaped with a backslash.
    """
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    widths = [max(map(len, column)) if aligned else 0 for column in zip(*cells, strict=True)]
    lines = ["| " + " | ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)) + " |" for row in cells]
    lines.insert(1, "|" + "|".join("-" * (width + 2 if aligned else 3) for width in widths) + "|")
    return "\n".join(lines) + "\n"
