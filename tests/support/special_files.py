"""Links to files that must not change, and pipes."""

import os
from pathlib import Path


def symlink_to_file(link: Path) -> Path:
    """Create `link` to a file with the text "precious", and return the file."""
    target = link.with_name(f"{link.name}.precious")
    target.write_text("precious")
    link.symlink_to(target)
    return target


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)
