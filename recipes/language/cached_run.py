"""A finished run of a recipe, made once and kept in the cache: such as the base of another recipe."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from filelock import FileLock

import toolkit as tk

BUILD_TIMEOUT_S = 600
"""Seconds that a process waits for another process that trains the same model."""


def cached_run(recipe: Path, flags: Sequence[str], *, needs: str, key: str = "") -> Path:
    """Return the cached folder of the finished run of `recipe` with `flags`; run it in one process if there is none.

    The cache key is the recipe's text, the flags, and `key`, which should change with the data. A run without the file
    or folder `needs` is repeated; an interrupted run is resumed. Call it on one rank. Raises UserError if the run
    fails.
    """
    known = repr((recipe.read_text(encoding="utf-8"), list(flags), key, tk.__version__))
    folder = tk.data.cache_dir() / f"{recipe.stem}-{hashlib.sha256(known.encode()).hexdigest()[:16]}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock", timeout=BUILD_TIMEOUT_S):
            if tk.results_of(folder) is not None and not (folder / needs).exists():
                shutil.rmtree(folder)
            if tk.results_of(folder) is None:
                _train(recipe, [*flags, "--run-dir", str(folder)])
    except OSError as error:  # a lock that is not given in time is one
        folder = tk.data.cache_dir()
        raise tk.UserError(f"the cache folder {folder} cannot be used ({error}): set TOOLKIT_CACHE_DIR.") from None
    return folder


def _train(recipe: Path, words: Sequence[str]) -> None:
    # The variables of `accelerate launch` are for the calling run; this one has flags.
    own = tk.without_launcher(os.environ)
    environment = {name: value for name, value in own.items() if not name.startswith("ACCELERATE_")}
    if code := subprocess.call([sys.executable, str(recipe), *words], env=environment):
        raise tk.UserError(f"{recipe.name} ended with exit code {code}, see above: run the same command again.")
