"""Axes and the cells of their grid. All cells are validated before the first run starts."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from toolkit.errors import UserError
from toolkit.run.config.run import to_dict
from toolkit.run.config.settings import decides_what_is_learned
from toolkit.run.recipe_script import Recipe


@dataclass(frozen=True)
class Cell:
    """One run of a sweep."""

    values: Mapping[str, str]
    """Values by axis, including the seed."""
    digest: str
    """Digest of the axes and of all settings that affect results: equal for the same run in two sweeps."""
    config: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """All settings, as in config.json."""

    @property
    def flags(self) -> list[str]:
        """Values as command-line flags of the recipe."""
        return [word for name, value in self.values.items() for word in (f"--{name}", *value.split())]

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.values.items())


def parse_axes(words: Sequence[str]) -> dict[str, list[str]]:
    """Return `["labels=100,600"]` as `{"labels": ["100", "600"]}`. Raises UserError for a word that is not an axis."""
    axes: dict[str, list[str]] = {}
    for word in words:
        name, equals, values = word.partition("=")
        name = name.strip().removeprefix("--").replace("_", "-")
        axis = list(dict.fromkeys(value.strip() for value in values.split(",")))
        if not (name and equals and all(axis)):
            raise UserError(f"--grid {word}: has no values. Write a flag and its values, such as labels=100,600.")
        if remedy := {"seed": "--num-seeds and --seed-offset", "run-dir": "--out"}.get(name):
            raise UserError(f"--grid {word}: cannot be an axis. Use {remedy} instead.")
        axes[name] = list(dict.fromkeys([*axes.get(name, []), *axis]))
    return axes


def make_cell(recipe: Recipe, values: Mapping[str, str]) -> Cell:
    """Return the run of `recipe` with `values`. Raises UserError for values that the recipe does not accept."""
    config = recipe.config(Cell(values, "").flags)
    return Cell(values, config_digest(recipe.script.stem, config, axes=values), to_dict(config))


def grid_cells(recipe: Recipe, axes: Mapping[str, Sequence[str]], seeds: Sequence[int]) -> list[Cell]:
    """Return all cells, seed by seed, so that an interrupted sweep has some seeds of every combination.

    Raises UserError for an axis that is not a flag of the recipe, a value that the recipe does not accept, and two
    cells with equal settings, which would share a folder.
    """
    combinations = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    cells: dict[str, Cell] = {}
    for seed in seeds:
        for combination in combinations:
            cell = make_cell(recipe, combination | {"seed": str(seed)})
            if other := cells.get(cell.digest):
                raise UserError(f"--grid: {other} and {cell} have equal settings. Leave one out.")
            cells[cell.digest] = cell
    return list(cells.values())


def config_digest(recipe: str, config: Any, axes: Iterable[str] = ()) -> str:
    """Return 12 hexadecimal digits of the fields of `config` that are axes or affect results, without defaults.

    So a field that a later version adds does not change the cells of a sweep; `CellRunner` raises for cells from before
    a default changed.
    """
    swept = {axis.replace("-", "_").partition(".")[0] for axis in axes}
    plain = to_dict(config)
    required = {name: getattr(config, name) for name, field in type(config).model_fields.items() if field.is_required()}
    usual = to_dict(type(config)(**required))
    fields = {
        name: value
        for name, value in plain.items()
        if (name in swept or decides_what_is_learned(name)) and (name in required or value != usual[name])
    }
    text = json.dumps({"recipe": recipe, **fields}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
