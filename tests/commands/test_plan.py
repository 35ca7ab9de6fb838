"""`toolkit plan`: a line for each layout, from config.json alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from language.small_models import language_model_config
from tests.experts.hosts.transformers.families import config
from toolkit.commands import main
from toolkit.commands.plan import OF_A_DEVICE


def rows(printed: str) -> list[dict[str, str]]:
    """The lines of a table by the words above them, which two spaces part."""
    head, *lines = (line.replace("experts ", "experts_").split() for line in printed.splitlines())
    return [dict(zip(head, line, strict=True)) for line in lines]


def test_each_layout_that_the_gpus_allow_has_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config("mixtral").save_pretrained(tmp_path)
    assert main(["plan", str(tmp_path), "--gpus", "4", "--memory", str(OF_A_DEVICE + 0.1), "--context", "8"]) == 0
    found = rows(capsys.readouterr().out)
    assert [row["experts_over"] for row in found] == ["1"] * 4 + ["2"] * 4 + ["4"] * 4
    assert {(row["experts_in"], row["checkpointing"]) for row in found} == {
        (kind, recomputed) for kind in ("bfloat16", "4bit") for recomputed in ("no", "yes")
    }
    assert {row["fits"] for row in found} == {"yes"}
    assert main(["plan", str(tmp_path), "--gpus", "1", "--memory", str(OF_A_DEVICE / 2), "--lora-rank", "0"]) == 0
    found = rows(capsys.readouterr().out)
    assert [row["experts_in"] for row in found] == ["bfloat16"] * 2
    assert {row["fits"] for row in found} == {"no"}


def test_a_model_without_experts_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    sizes = {"vocab_size": 64, "dim": 16, "layers": 1, "heads": 2, "context": 8}
    language_model_config("qwen3_moe", **sizes, experts=0, top_k=1, expert_hidden_size=8).save_pretrained(tmp_path)
    assert main(["plan", str(tmp_path), "--gpus", "1", "--memory", "80"]) == 2
    assert "has no experts that are stacked tensors" in capsys.readouterr().err
