"""A run of a recipe that is kept in the cache: made once, continued, and by itself whatever world asks for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from language.cached_run import cached_run
from toolkit.errors import UserError
from toolkit.run.launch.restarts import restarted

RECIPE = """
import os, pathlib, sys
*words, _, folder = sys.argv[1:]
folder = pathlib.Path(folder)
(folder / "model").mkdir(parents=True, exist_ok=True)
with (folder / "starts").open("a") as starts:
    starts.write(f"{' '.join(words)} {os.environ.get('WORLD_SIZE')} {os.environ.get('ACCELERATE_USE_CPU')} "
                 f"{os.environ.get('TOOLKIT_RESTARTED')}\\n")
if "--fail" in words:
    sys.exit(3)
(folder / "results.json").write_text("{}")
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TOOLKIT_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "some_recipe.py").write_text(RECIPE)
    return tmp_path / "some_recipe.py"


def test_it_is_made_once_for_its_flags_its_data_and_the_recipe(recipe):
    first = cached_run(recipe, ["--lr", "1"], needs="model", key="text")
    assert first.name.startswith("some_recipe-")
    assert cached_run(recipe, ["--lr", "1"], needs="model", key="text") == first
    assert (first / "starts").read_text().count("\n") == 1
    others = {
        cached_run(recipe, ["--lr", "2"], needs="model", key="text"),
        cached_run(recipe, ["--lr", "1"], needs="model", key="other text"),
    }
    recipe.write_text(RECIPE + "\n")
    others.add(cached_run(recipe, ["--lr", "1"], needs="model", key="text"))
    assert len(others | {first}) == 4


def test_it_is_made_anew_where_what_is_needed_was_removed(recipe):
    folder = cached_run(recipe, [], needs="model")
    (folder / "model").rmdir()
    assert cached_run(recipe, [], needs="model") == folder
    assert (folder / "model").is_dir()
    assert (folder / "starts").read_text().count("\n") == 1


def test_it_is_no_rank_of_the_world_that_asks(recipe, monkeypatch):
    environment = {"WORLD_SIZE": "2", "RANK": "0", "ACCELERATE_USE_CPU": "true"}
    # A run that was started again, before whose start the base had not been finished.
    for name, value in (environment | restarted(Path("run"), ["a rank was killed"])).items():
        monkeypatch.setenv(name, value)
    assert (cached_run(recipe, ["--a"], needs="model") / "starts").read_text() == "--a None None None\n"


def test_a_run_that_fails_is_named_and_continued_by_the_next_call(recipe):
    for _ in range(2):
        with pytest.raises(UserError, match=r"some_recipe.py ended with exit code 3, see above"):
            cached_run(recipe, ["--fail"], needs="model")
    (folder,) = (path for path in (recipe.parent / "cache").iterdir() if path.is_dir())
    assert (folder / "starts").read_text().count("\n") == 2


def test_a_cache_that_cannot_be_written_is_named(recipe, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TOOLKIT_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(UserError, match="set TOOLKIT_CACHE_DIR"):
        cached_run(recipe, [], needs="model")
