"""A recipe's script, as what starts several runs of it reads it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import UserError
from toolkit.run.cli import parse


@dataclass(frozen=True)
class Recipe:
    """A script with `PRESETS`, and the words that every run of it is started with."""

    script: Path
    arguments: tuple[str, ...]
    presets: Mapping[str, Any]
    main: Callable[[Any], Any] | None
    """Takes a config, and trains."""

    def config(self, flags: Sequence[str]) -> Any:
        """The config of a run with `flags` as well. Raises UserError where the recipe's command line would."""
        return parse(self.presets, [*self.arguments, *flags])


def load_recipe(script: Path, arguments: Sequence[str]) -> Recipe:
    """Return the recipe at `script`. Raises UserError if that is none, or if `arguments` are not for it.

    Its folder is put on the search path, as `python SCRIPT` does, so that it can import its neighbours.
    """
    if not script.is_file() or script.suffix != ".py":
        raise UserError(f"{script}: no such script: give the path of a recipe.")
    name = f"recipe_{script.stem}"
    spec = importlib.util.spec_from_file_location(name, script)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # where the types of its config are looked up
    if (neighbours := str(script.resolve().parent)) not in sys.path:
        sys.path.insert(0, neighbours)
    spec.loader.exec_module(module)
    presets = getattr(module, "PRESETS", None)
    if not isinstance(presets, dict):
        remedy = "name them there, as in PRESETS = {'full': full}, and give PRESETS to run_recipe"
        raise UserError(f"{script}: has no PRESETS, from which sweeps read presets: {remedy}.")
    recipe = Recipe(script, tuple(arguments), presets, getattr(module, "main", None))
    recipe.config(())
    return recipe
