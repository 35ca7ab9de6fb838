"""The six sample commands of the guide that `docs/start/migration/morph.md` translates leave every file that it
promised."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import networkx as nx
import pytest

from recipes.mnist_moe import PRESETS, main
from tests.support.forked_python import run_forked
from tests.support.helpers import ROOT
from toolkit.run import cli

GUIDE = (ROOT / "docs" / "start" / "migration" / "morph.md").read_text()
COMMANDS = re.findall(r"^\| .*\| `(dynamic[^`]*)` \|$", GUIDE, re.MULTILINE)
SMALL = "--dataset digits --max-steps 6 --expert-hidden-size 8 --dim 8 --tracker none --cpu --run-dir"


def test_there_are_six():
    assert len(COMMANDS) == 6


@pytest.mark.parametrize("command", dict.fromkeys(command.removesuffix(" --cpu") for command in COMMANDS))
def test_a_command_of_the_guide_leaves_what_was_promised(command: str, tmp_path: Path):
    words = [*shlex.split(command), *SMALL.split(), str(tmp_path)]
    if "--num-processes 2" in command:
        done = run_forked("recipes/mnist_moe.py", *words)
        assert done.returncode == 0, done.stderr
    else:
        main(cli.parse(PRESETS, words))
    summary = (tmp_path / "performance_summary.txt").read_text()
    assert "active experts" in summary
    graph = json.loads((tmp_path / "knowledge_graph.json").read_text())
    assert len(nx.node_link_graph(graph, edges="edges")) >= 4
    results = json.loads((tmp_path / "results.json").read_text())
    ranks = results["expert_placement"]["block"]
    assert sum(map(len, ranks)) == results["active_experts"], (
        "of sixteen logical experts, those that are active at the end"
    )
