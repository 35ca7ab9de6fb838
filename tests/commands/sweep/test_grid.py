"""Axes, cells and digests of sweeps."""

import re

import pytest

from benchmarks.support.processes import ROOT
from toolkit.commands.sweep.grid import config_digest, grid_cells, parse_axes
from toolkit.errors import UserError
from toolkit.run.recipe_script import load_recipe


def test_grid_is_the_product_of_axes_and_seeds(toy):
    axes = parse_axes(["labels=100,600", "rate=0,0.2"])
    cells = grid_cells(load_recipe(toy, ["full"]), axes, range(3, 5))
    assert [str(cell) for cell in cells] == [
        f"labels={labels} rate={rate} seed={seed}" for seed in (3, 4) for labels in (100, 600) for rate in ("0", "0.2")
    ]
    assert len({cell.digest for cell in cells}) == 8
    assert cells[0].flags == ["--labels", "100", "--rate", "0", "--seed", "3"]


@pytest.mark.parametrize("word", ["labels", "labels=1,,2", "seed=1,2", "run-dir=a,b"])
def test_invalid_axis_raises(word):
    with pytest.raises(UserError, match=f"--grid {word}: "):
        parse_axes([word])


@pytest.mark.parametrize(
    ("axis", "message"),
    [
        ("labels=100,0", "labels=0: take one or more"),
        ("lables=100", "Did you mean --labels"),
        ("labels=8,08", "--grid: labels=8 seed=3 and labels=08 seed=3 have equal settings"),
    ],
)
def test_invalid_cell_raises(axis, message, toy):
    with pytest.raises(UserError, match=message):
        grid_cells(load_recipe(toy, []), parse_axes([axis]), [3])


def test_grid_over_a_speed_setting_has_a_cell_per_value(toy):
    cells = grid_cells(load_recipe(toy, []), parse_axes(["num-workers=0,1"]), [3])
    assert len({cell.digest for cell in cells}) == 2


def test_recipes_of_the_docs_can_be_swept(tmp_path):
    guide = (ROOT / "docs" / "train" / "recipes.md").read_text(encoding="utf-8")
    scripts = [block for block in re.findall(r"```python run\n(.*?)```", guide, re.DOTALL) if "run_recipe(" in block]
    assert len(scripts) > 1
    for number, text in enumerate([*scripts, (ROOT / "docs/examples/text_classification.py").read_text()]):
        script = tmp_path / f"guide_{number}.py"
        script.write_text(text)
        assert "full" in load_recipe(script, []).presets


def test_digest_depends_only_on_settings_that_affect_results(toy):
    recipe = load_recipe(toy, [])
    base = config_digest("toy", recipe.config([]))
    assert config_digest("toy", recipe.config(["--num-workers", "4", "--tracker", "none", "--cpu"])) == base
    assert config_digest("toy", recipe.config(["--labels", "100"])) == base, "100 is the default"
    assert config_digest("toy", recipe.config(["--labels", "600"])) != base
    assert config_digest("other", recipe.config([])) != base
