"""Recipe scripts, loaded by commands that start several runs."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import UserError, require_type
from toolkit.run.cli import parse


@dataclass(frozen=True)
class Recipe:
    """A script with `PRESETS`, and the command-line arguments of every run."""

    script: Path
    arguments: tuple[str, ...]
    presets: Mapping[str, Any]

    def config(self, flags: Sequence[str]) -> Any:
        """Return the config of a run with additional `flags`. Raises UserError for invalid flags."""
        return parse(self.presets, [*self.arguments, *flags])


def load_recipe(script: Path, arguments: Sequence[str]) -> Recipe:
    """Return the recipe at `script`. Raises UserError if `script` is not a recipe or `arguments` are invalid.

    Adds its folder to `sys.path`, as `python SCRIPT` does, so that it can import modules next to it.
    """
    if not script.is_file() or script.suffix != ".py":
        raise UserError(f"{script}: does not exist. Give the path of a recipe.")
    name = f"recipe_{script.stem}"
    spec = importlib.util.spec_from_file_location(name, script)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # needed to resolve annotations of its config
    if (neighbours := str(script.resolve().parent)) not in sys.path:
        sys.path.insert(0, neighbours)
    spec.loader.exec_module(module)
    presets: Any = getattr(module, "PRESETS", None)
    remedy = "Name the presets there, as in PRESETS = {'full': full}, and give PRESETS to run_recipe"
    require_type(f"{script}: PRESETS", presets, dict, remedy)
    recipe = Recipe(script, tuple(arguments), presets)
    recipe.config(())
    return recipe
