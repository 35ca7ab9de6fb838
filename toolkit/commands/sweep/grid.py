"""Axes, and the cells that they span. Everything is checked before the first run starts."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from toolkit.errors import UserError, did_you_mean
from toolkit.run.config.flags import flags_of
from toolkit.run.config.run import to_dict
from toolkit.run.config.settings import decides_what_is_learned
from toolkit.run.recipe_script import Recipe


@dataclass(frozen=True)
class Cell:
    """One run of a sweep."""

    values: Mapping[str, str]
    """By name of the axis; the seed is one of them."""
    digest: str
    """Of everything that decides what is learned: the same run has the same digest in every sweep."""
    config: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """All of its settings, as config.json has them."""

    @property
    def flags(self) -> list[str]:
        """Returns them as the recipe's command line takes them."""
        return [word for name, value in self.values.items() for word in (f"--{name}", *value.split())]

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.values.items())


def parse_axes(words: Sequence[str]) -> dict[str, list[str]]:
    """`["labels=100,600"]` as `{"labels": ["100", "600"]}`. Raises UserError for a word that is no axis."""
    axes: dict[str, list[str]] = {}
    for word in words:
        name, equals, values = word.partition("=")
        name = name.strip().removeprefix("--").replace("_", "-")
        axis = list(dict.fromkeys(value.strip() for value in values.split(",")))
        if not (name and equals and all(axis)):
            raise UserError(f"--grid {word}: write a flag and its values, such as labels=100,600.")
        if name == "seed":
            raise UserError(f"--grid {word}: use --num-seeds and --seed-offset instead.")
        if name == "run-dir":
            raise UserError(f"--grid {word}: a sweep gives each run a folder of its own: use --out instead.")
        if name in axes:
            raise UserError(f"--grid {word}: {name} is an axis already: give all its values at once.")
        axes[name] = axis
    return axes


def make_cell(recipe: Recipe, values: Mapping[str, str]) -> Cell:
    """The run of `recipe` with `values`. Raises UserError where the recipe refuses them."""
    config = recipe.config(Cell(values, "").flags)
    return Cell(values, config_digest(recipe.script.stem, config), to_dict(config))


def grid_cells(recipe: Recipe, axes: Mapping[str, Sequence[str]], seeds: Sequence[int]) -> list[Cell]:
    """All cells, seed by seed, so that a sweep that is cut short has some seeds of everything.

    Raises UserError for an axis that is no flag of the recipe, a value that the recipe refuses, and two cells that
    learn the same, which would share a folder.
    """
    if any(word.partition("=")[0] in ("--run-dir", "--run_dir") for word in recipe.arguments):
        raise UserError("--run-dir: a sweep gives each run a folder of its own: use --out instead.")
    flags = flags_of(type(recipe.config(())))
    for name, values in axes.items():
        flag = f"--{name}"
        if flag not in flags:
            axis = f"--grid {name}={','.join(values)}"
            raise UserError(
                f"{axis}: {recipe.script} has no flag {flag}: {did_you_mean(flag, flags, 'see its --help all.')}"
            )
    combinations = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    cells: dict[str, Cell] = {}
    for seed in seeds:
        for combination in combinations:
            cell = make_cell(recipe, combination | {"seed": str(seed)})
            if other := cells.get(cell.digest):
                raise UserError(f"--grid: {other} and {cell} learn the same: leave one out.")
            cells[cell.digest] = cell
    return list(cells.values())


def config_digest(recipe: str, config: Any) -> str:
    """Twelve hexadecimal digits of the fields of `config` that decide what is learned and differ from their defaults.

    So a field that a later version adds leaves the cells of a sweep what they are; `CellRunner` refuses cells from
    before a default changed.
    """
    plain = to_dict(config)
    required = {name: getattr(config, name) for name, field in type(config).model_fields.items() if field.is_required()}
    usual = to_dict(type(config)(**required))
    fields = {
        name: value
        for name, value in plain.items()
        if decides_what_is_learned(name) and (name in required or value != usual[name])
    }
    text = json.dumps({"recipe": recipe, **fields}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
