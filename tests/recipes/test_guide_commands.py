"""Commands of the documentation: samples in `docs/start/migration/morph.md`, own data in `recipes/README.md`."""

import importlib
import json
import re
import shlex

import networkx as nx
import numpy as np
import pandas
import pytest
from PIL import Image

from benchmarks.support.processes import ROOT
from recipes.mnist_moe import PRESETS, main
from tests.recipes.runs import assert_figures, results, save_language_model
from tests.recipes.speech.sounds import encode_wav
from tests.support.forked_python import run_forked
from toolkit.run import cli

GUIDE = (ROOT / "docs" / "start" / "migration" / "morph.md").read_text()
COMMANDS = re.findall(r"^\| .*\| `(dynamic[^`]*)` \|$", GUIDE, re.MULTILINE)
SMALL = "--dataset digits --max-steps 6 --expert-hidden-size 8 --dim 8 --tracker none --cpu --run-dir"


@pytest.mark.parametrize("command", dict.fromkeys(command.removesuffix(" --cpu") for command in COMMANDS))
def test_command_of_guide_writes_promised_files(command, tmp_path):
    words = [*shlex.split(command), *SMALL.split(), str(tmp_path)]
    if "--num-processes 2" in command:
        done = run_forked("recipes/mnist_moe.py", *words)
        assert done.returncode == 0, done.stderr
    else:
        main(cli.parse(PRESETS, words))
    assert_figures(tmp_path, ranks=1 + ("--num-processes 2" in command))
    assert "active experts" in (tmp_path / "performance_summary.txt").read_text()
    graph = json.loads((tmp_path / "knowledge_graph.json").read_text())
    assert len(nx.node_link_graph(graph, edges="edges")) >= 4
    placement = results(tmp_path)["expert_placement"]["block"]
    assert sum(map(len, placement)) == results(tmp_path)["active_experts"]


PAGE = (ROOT / "recipes" / "README.md").read_text().partition("## Your own dataset")[2]
OWN_DATA_COMMANDS = re.findall(r"^python recipes/(\w+)\.py (.*)$", PAGE, re.MULTILINE)
RANDOM = np.random.default_rng(0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folder with the datasets of the page."""
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
    documents = [json.dumps({"text": f"letter {n}. " * 40}) + "\n" for n in range(200)]
    (folder / "letters.jsonl").write_text("".join(documents))
    save_language_model(folder / "base")
    return folder


def test_guide_has_six_commands_and_page_one_for_each_kind_of_data():
    assert len(COMMANDS) == 6
    assert {name for name, _ in OWN_DATA_COMMANDS} >= {"mnist_moe", "few_labels", "har", "lmu_speech", "lm_moe"}


@pytest.mark.parametrize(("recipe", "words"), OWN_DATA_COMMANDS)
def test_command_of_page_trains(recipe, words, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)
    module = importlib.import_module(f"recipes.{recipe}")
    more = ["--tracker", "none", "--cpu", "--max-steps", "3", "--run-dir", str(tmp_path / "run")]
    if recipe == "finetune_moe":  # without training a base
        more += ["--model", "base", "--tokenizer", "bytes"]
    facts = module.main(cli.parse(module.PRESETS, [*shlex.split(words), *more]))
    assert facts["dataset"] in ("fruit", "trials.csv", "voices", "letters.jsonl")
    assert facts["test_loss"] > 0
    assert ("validation_loss" in facts) == ("patience" in words or "--validation" in words)
