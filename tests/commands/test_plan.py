"""`toolkit plan`: memory of each layout, from config.json only."""

from pathlib import Path

import pytest

from benchmarks.support.families import config
from toolkit.commands import main
from toolkit.commands.plan import OF_A_DEVICE


def rows(printed: str) -> list[dict[str, str]]:
    """Return the rows of a printed table by column name."""
    head, *lines = (
        line.replace("experts ", "experts_").replace("shards ", "shards_").split() for line in printed.splitlines()
    )
    return [dict(zip(head, line, strict=True)) for line in lines]


def test_plan_lists_every_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config("mixtral").save_pretrained(tmp_path)
    assert main(["plan", str(tmp_path), "--gpus", "2", "--memory", str(OF_A_DEVICE + 0.1), "--context", "8"]) == 0
    found = rows(capsys.readouterr().out)
    assert [(row["experts_over"], row["shards_over"], row["parallel"]) for row in found] == [
        *[("1", "1", "ddp")] * 4,
        *[("1", "2", "fsdp2")] * 2,
        *[("2", "1", "ddp")] * 4,
        *[("2", "1", "fsdp2")] * 4,
    ]
    assert {(row["experts_in"], row["checkpointing"]) for row in found} == {
        (kind, recomputed) for kind in ("bfloat16", "4bit") for recomputed in ("no", "yes")
    }
    assert {row["fits"] for row in found} == {"yes"}
    assert main(["plan", str(tmp_path), "--gpus", "1", "--memory", str(OF_A_DEVICE / 2), "--lora-rank", "0"]) == 0
    found = rows(capsys.readouterr().out)
    assert [row["experts_in"] for row in found] == ["bfloat16"] * 2
    assert {row["fits"] for row in found} == {"no"}


def test_plan_of_all_weights_falls_with_the_world(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    large = config("mixtral")
    large.update({"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "head_dim": 128})
    large.save_pretrained(tmp_path)
    least = []
    for gpus in ("8", "16", "64"):
        assert main(["plan", str(tmp_path), "--gpus", gpus, "--memory", "80", "--lora-rank", "0"]) == 0
        found = rows(capsys.readouterr().out)
        assert {row["experts_over"] for row in found} == {"1", "2", "4", "8"}  # not more than there are experts
        assert len({tuple(row.values()) for row in found}) == len(found)
        least.append(min(float(row["GiB"]) for row in found))
    assert least[0] > 1.5 * least[1] > 2 * 1.5 * least[2]


def test_exact_plan_follows_the_closed_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config("mixtral").save_pretrained(tmp_path)
    assert main(["plan", str(tmp_path), "--gpus", "2", "--memory", "80", "--lora-rank", "0", "--exact"]) == 0
    printed = capsys.readouterr().out
    closed, exact = printed.split("experts over")[1:]
    assert (closed.count("fsdp2"), closed.count("ddp")) == (4, 4)
    assert (exact.count("fsdp2"), exact.count("ddp")) == (0, 4)


def test_plan_with_offload_counts_experts_in_host_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    large = config("mixtral")
    large.update({"num_hidden_layers": 4, "hidden_size": 1024, "intermediate_size": 8192})
    large.save_pretrained(tmp_path)
    words = ["plan", str(tmp_path), "--gpus", "1", "--memory", "80", "--context", "8"]
    tables = []
    for flags in ([], ["--offload"]):
        assert main([*words, *flags]) == 0
        tables.append(rows(capsys.readouterr().out))
    layer = 8 * 3 * 1024 * 8192 * 2 / 2**30
    for inside, outside, kept in zip(*tables, (1, 1, 0.28125, 0.28125), strict=True):
        assert float(outside["host"]) == pytest.approx(4 * layer * kept, abs=0.05)
        assert float(inside["weights"]) - float(outside["weights"]) == pytest.approx(2 * layer * kept, abs=0.1)


@pytest.mark.parametrize("text", ["[1, 2", "[]", '{"model_type": "mixtral", "hidden_size": "wide"}'])
def test_plan_of_a_damaged_config_raises(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "config.json").write_text(text)
    assert main(["plan", str(tmp_path), "--gpus", "1", "--memory", "80"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {tmp_path}: cannot be read (")
    assert error.count("\n") == 1
