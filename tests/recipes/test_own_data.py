"""The commands for own data in `recipes/README.md` train every recipe on small sets of the shapes named there."""

from __future__ import annotations

import importlib
import json
import re
import shlex
from pathlib import Path

import numpy as np
import pandas
import pytest
from PIL import Image

from tests.recipes.speech.sounds import encode_wav
from tests.support.helpers import ROOT
from toolkit.run import cli

PAGE = (ROOT / "recipes" / "README.md").read_text().partition("## Your own dataset")[2]
COMMANDS = re.findall(r"^python recipes/(\w+)\.py (.*)$", PAGE, re.MULTILINE)
RANDOM = np.random.default_rng(0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the data sets of the page."""
    folder = tmp_path_factory.mktemp("own")
    for split, count in {"train": 12, "test": 3}.items():
        for name in ("apple", "pear", "plum"):
            (folder / "fruit" / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = RANDOM.integers(0, 256, (14, 18, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / "fruit" / split / name / f"{number}.png")
    rows = [
        {"subject": subject, "activity": activity, "time": t, **dict(zip("abcd", RANDOM.normal(size=4), strict=True))}
        for subject in range(6)
        for activity in ("sit", "run")
        for t in range(100)
    ]
    pandas.DataFrame(rows).to_csv(folder / "trials.csv", index=False)
    (folder / "voices").mkdir()
    lines = ["file_name,text,speaker"]
    for number in range(40):
        sound = (0.1 * RANDOM.standard_normal(8000)).astype(np.float32)
        (folder / "voices" / f"{number}.wav").write_bytes(encode_wav(sound, 16000))
        lines.append(f"{number}.wav,{('yes', 'no')[number % 2]},{number % 4}")
    (folder / "voices" / "metadata.csv").write_text("\n".join(lines))
    (folder / "letters.jsonl").write_text(
        "".join(json.dumps({"text": f"letter {n}. " * 40}) + "\n" for n in range(200))
    )
    return folder


def test_the_page_has_a_command_for_each_kind_of_data():
    assert {name for name, _ in COMMANDS} >= {"mnist_moe", "few_labels", "har", "lmu_speech", "lm_moe"}


@pytest.mark.parametrize(("recipe", "words"), COMMANDS)
def test_a_command_of_the_page_trains(recipe, words, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)
    module = importlib.import_module(f"recipes.{recipe}")
    more = ["--tracker", "none", "--cpu", "--max-steps", "3", "--run-dir", str(tmp_path / "run")]
    results = module.main(cli.parse(module.PRESETS, [*shlex.split(words), *more]))
    assert results["dataset"] in ("fruit", "trials.csv", "voices", "letters.jsonl")
    assert results["test_loss"] > 0
    assert ("validation_loss" in results) == ("patience" in words or "--validation" in words)
