"""The recipe finetune_moe: it resumes, does the same on two processes, and leaves adapters that stock PEFT reads.

`docs/experts/adapters.md` runs the debug preset as it is, whose base lm_moe makes.
"""

from __future__ import annotations

import json
import os
import random
import re
import resource
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from language.small_models import language_model_config
from recipes import finetune_moe
from tests.support.equality import IN_FLOAT64, in_float64
from tests.support.helpers import run_distributed
from tests.support.preempted import preempted_at
from toolkit.audit.checks import audit
from toolkit.data.text import load_text
from toolkit.data.tokenizer import ByteTokenizer
from toolkit.errors import Preempted, UserError
from toolkit.experts.moving.replan_options import ReplanOptions
from toolkit.integrations.peft.merged_weights import save_merged
from toolkit.integrations.transformers import causal_lm, use_toolkit_kernel
from toolkit.run import cli
from toolkit.run.tracking.jsonl import read_metrics
from toolkit.train.tasks.language_modeling import LanguageModeling
from toolkit.train.trainer import Trainer

STOP_AT = 7
ADAPTER, MERGED = "adapter/adapter_model.safetensors", "merged/model.safetensors"
SIZES: dict[str, Any] = {"vocab_size": 256, "dim": 16, "layers": 2, "heads": 2, "context": 32}
MIXTURE: dict[str, Any] = {"experts": 4, "top_k": 2, "expert_hidden_size": 16}


def corpus(path: Path, words: list[str]) -> Path:
    """A small text whose words come in an order that can be learned, in part."""
    draws = random.Random(0)
    path.write_text("\n".join(" ".join(draws.choices(words, k=6)) for _ in range(500)))
    return path


def make_base(folder: Path) -> Path:
    torch.manual_seed(0)
    causal_lm(language_model_config("qwen3_moe", **SIZES, **MIXTURE)).save_pretrained(folder)
    return folder


def config(folder: Path, run: str, **changes: Any) -> finetune_moe.Config:
    usual = {
        "model": str(folder / "base"),
        "tokenizer": "bytes",
        "dataset": str(folder / "new.txt"),
        "old_dataset": str(folder / "old.txt"),
        "run_dir": folder / run,
        "eval_blocks": None,
        "tracker": "none",
        "cpu": True,
    }
    return finetune_moe.debug().replace(**{**usual, **changes})


def main_in_float64(config: finetune_moe.Config) -> None:
    build_model = finetune_moe.build_model
    with in_float64(), mock.patch.object(finetune_moe, "build_model", lambda *args: build_model(*args).double()):
        finetune_moe.main(config)


def merge_on_a_full_disk(*args: Any) -> None:
    """As `save_merged`, while no file can get longer than a part of the model."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        save_merged(*args)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def train(folder: Path, alone: bool) -> None:
    """Runs that are left alone, one with everything on; and one that is stopped, ends on a full disk, and is
    continued."""
    os.environ["TOOLKIT_CACHE_DIR"] = str(folder / "cache")
    if alone:
        main_in_float64(config(folder, "one", freeze_router=False))
        main_in_float64(config(folder, "whole", lora_rank=0, freeze_router=False, lr=1e-3))
        return
    moved = {"replan": ReplanOptions(planner="swap", every=3, guarded=False), "merge": True, "freeze_router": False}
    main_in_float64(config(folder, "two", **moved))
    main_in_float64(config(folder, "cut", dense_parallel="fsdp2", freeze_router=False, merge=True))
    with preempted_at(STOP_AT):
        main_in_float64(config(folder, "stopped", **moved))
    with mock.patch("toolkit.integrations.peft.merged_weights.save_merged", merge_on_a_full_disk):
        with pytest.raises(UserError, match=r"/merged: cannot be written \(.*\). Make room"):
            main_in_float64(config(folder, "stopped", **moved))
        assert not any((folder / "stopped" / "merged").iterdir())
    main_in_float64(config(folder, "stopped", **moved))


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base, a text that is new to it, and one that stands for what it knew."""
    folder = tmp_path_factory.mktemp("finetune_moe")
    corpus(folder / "new.txt", ["to be", "or not", "that is", "the question"])
    corpus(folder / "old.txt", ["exit", "alarum", "a flourish"])
    make_base(folder / "base")
    return folder


@pytest.fixture(scope="module")
def runs(texts: Path) -> Path:
    """The folder of "one" process; "two" that own and move experts; "cut", with FSDP2; "whole", without
    adapters; and "stopped", which was continued."""
    run_distributed(train, 1, texts, True)
    run_distributed(train, 2, texts, False)
    return texts


def metrics(run: Path) -> list[dict[str, Any]]:
    return list(read_metrics(run / "metrics.jsonl"))


def results(run: Path) -> dict[str, Any]:
    return json.loads((run / "results.json").read_text())


@pytest.mark.parametrize("two", ["two", "cut"])
def test_two_processes_that_own_and_move_experts_do_what_one_does(two, runs):
    for mine, theirs in zip(metrics(runs / two), metrics(runs / "one"), strict=True):
        learned = {name for name in theirs if name.startswith(("train/", "eval", "old"))}
        assert "train/loss" in learned
        assert {k: mine[k] for k in learned} == pytest.approx({k: theirs[k] for k in learned}, rel=IN_FLOAT64)
    assert "train/grad_norm" in metrics(runs / two)[-1]
    losses = [line["train/loss"] for line in metrics(runs / "one")]
    assert losses[-1] < losses[0] - 0.05
    assert results(runs / "two")["migrated_experts"] > 0


def test_a_stopped_run_goes_on_as_if_it_had_not_been(runs):
    def lines(run: str) -> list[dict[str, Any]]:
        return [{k: v for k, v in line.items() if not k.startswith("perf/")} for line in metrics(runs / run)]

    assert lines("stopped") == lines("two")
    for weights in (ADAPTER, MERGED):
        assert (runs / "stopped" / weights).read_bytes() == (runs / "two" / weights).read_bytes()
    before = {name: value for name, value in results(runs / "two").items() if name.endswith("_at_start")}
    assert before.keys() >= {"test_bits_per_byte_at_start", "old_bits_per_byte_at_start"}
    assert {name: results(runs / "stopped")[name] for name in before} == before


@pytest.mark.parametrize("run", ["two", "cut"])
def test_stock_peft_and_plain_transformers_measure_the_same_bits_per_byte(run, runs):
    from transformers import AutoModelForCausalLM

    assert not audit(runs / run / "adapter", runs / "base").findings
    assert (runs / run / "merged" / "tokenizer.json").exists()
    use_toolkit_kernel()
    model = AutoModelForCausalLM.from_pretrained(runs / run / "merged", dtype=torch.float32).eval()
    for dataset, name in (("new.txt", "test"), ("old.txt", "old")):
        how: Any = {"tokenizer": "bytes", "block_size": 32, "batch_size": 32}
        data = load_text(str(runs / dataset), None, **how, on_main=lambda decide: decide())
        with torch.no_grad():
            loss = LanguageModeling().evaluate(model, data.test.columns)
        bits = loss.sums["bits_per_byte"].item() / int(loss.count)
        assert bits == pytest.approx(results(runs / run)[f"{name}_bits_per_byte"], rel=1e-5)
        assert bits != pytest.approx(results(runs / run)[f"{name}_bits_per_byte_at_start"], rel=1e-2)


def test_what_is_frozen_stays_as_it_was(runs, texts):
    base, whole = (causal_lm(path).state_dict() for path in (texts / "base", runs / "whole" / "model"))
    assert not any(torch.equal(value, whole[name]) for name, value in base.items() if "norm" not in name)
    merged = causal_lm(runs / "two" / "merged").state_dict()
    changed = {name.rpartition("layers.0.")[2] for name, value in base.items() if not torch.equal(value, merged[name])}
    kinds = {"mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"}
    kinds |= {f"self_attn.{letter}_proj.weight" for letter in "qkvo"}
    assert {name for name in changed if "layers" not in name} == kinds


def test_a_base_in_bfloat16_learns_on_a_cpu_with_adapters_in_float32(texts, tmp_path):
    from safetensors.torch import load_file

    done = finetune_moe.main(config(texts, "any", run_dir=tmp_path, dtype="bfloat16", merge=True))
    assert done["test_bits_per_byte"] < done["test_bits_per_byte_at_start"] - 0.02
    types = {path: {value.dtype for value in load_file(tmp_path / path).values()} for path in (ADAPTER, MERGED)}
    assert types == {ADAPTER: {torch.float32}, MERGED: {torch.bfloat16}}


def test_a_base_in_four_bits_learns_and_goes_on_after_it_has_finished(texts, tmp_path):
    asked = config(texts, "any", run_dir=tmp_path, dtype="bfloat16", quantize="4bit", max_steps=10)
    finetune_moe.main(asked)
    done = finetune_moe.main(asked.replace(extend=True, max_steps=20))
    assert done["steps"] == 20
    assert done["test_bits_per_byte"] < done["test_bits_per_byte_at_start"]


def test_blocks_that_are_computed_again_learn_the_same_on_two_processes(texts, tmp_path):
    plain, again = ({"run_dir": tmp_path / name, "max_steps": 4} for name in ("plain", "again"))
    run_distributed(_main, 2, config(texts, "any", **plain))
    run_distributed(_main, 2, config(texts, "any", **again, gradient_checkpointing=True))
    losses = [[line.get("train/loss") for line in metrics(tmp_path / name)] for name in ("plain", "again")]
    assert losses[0] == losses[1]


def _main(asked: finetune_moe.Config) -> None:
    finetune_moe.main(asked)


def test_what_a_process_will_take_is_said_and_more_than_is_free_is_refused(texts, tmp_path, monkeypatch, capsys):
    finetune_moe.main(config(texts, "any", run_dir=tmp_path / "run", max_steps=1))
    assert re.search(
        r"^memory +0\.0\d GiB expected in each process, of [\d.]+ that are free$", capsys.readouterr().out, re.M
    )
    monkeypatch.setattr("toolkit.train.fine_tuning_memory.free_memory", lambda *_: 1000)
    with pytest.raises(UserError, match=r"force=False: each process is expected to take 0\.0 GiB and has 0\.0"):
        finetune_moe.main(config(texts, "any", run_dir=tmp_path / "refused", max_steps=1))
    assert not (tmp_path / "refused" / "checkpoints").exists()
    finetune_moe.main(config(texts, "any", run_dir=tmp_path / "forced", max_steps=1, force=True))


# --- the table -------------------------------------------------------------------------------------------------------


def test_the_table_has_controls_of_as_many_steps_and_is_completed_after_a_stop(texts, tmp_path, monkeypatch):
    monkeypatch.setenv("TOOLKIT_CACHE_DIR", str(texts / "cache"))
    asked = config(texts, "any", run_dir=tmp_path / "run", compare=True, max_steps=3, merge=True)
    fit, runs = Trainer.fit, list[str]()

    def interrupted(self: Trainer) -> dict[str, Any]:
        runs.append(self.run.folder.name)
        if len(runs) == 3:
            raise Preempted("stopped")
        return fit(self)

    monkeypatch.setattr(Trainer, "fit", interrupted)
    with pytest.raises(Preempted):
        finetune_moe.main(asked)
    done = finetune_moe.main(asked)
    assert runs == ["run", "attention", "weights", "run", "weights"]
    rows = done["comparison"]
    assert [row["trained"] for row in rows] == [
        "nothing",
        "adapters of experts and attention",
        "adapters of attention",
        "all weights",
    ]
    assert rows[0]["new text"] == done["test_bits_per_byte_at_start"]
    assert rows[1]["old text"] == done["old_bits_per_byte"]
    for row, name in zip(rows[2:], ("attention", "weights"), strict=True):
        control = results(tmp_path / "run" / "controls" / name)
        assert (row["new text"], row["parameters"]) == (control["test_bits_per_byte"], control["trained_parameters"])
        assert control["steps"] == done["steps"]
    assert rows[3]["parameters"] == sum(p.numel() for p in causal_lm(texts / "base").parameters())
    assert len({row["new text"] for row in rows}) == 4
    summary = (tmp_path / "run" / "summary.txt").read_text()
    assert f"{rows[2]['new text']:.4f}" in summary
    assert "adapters of attention" in summary
    longer = finetune_moe.main(asked.replace(extend=True, max_steps=4))
    steps = [results(tmp_path / "run" / "controls" / name)["steps"] for name in ("attention", "weights")]
    assert [longer["steps"], *steps] == [4, 4, 4]


# --- refusals --------------------------------------------------------------------------------------------------------


def test_settings_that_leave_nothing_to_train_or_to_merge_are_refused():
    for words, message in (
        ("--merge --lora-rank 0", "--merge: there are no adapters"),
        ("--no-lora-experts --no-lora-attention", "neither experts nor attention"),
        ("--quantize 4bit --merge", "--quantize 4bit: experts in four bits are frozen"),
    ):
        with pytest.raises(UserError, match=message):
            cli.parse(finetune_moe.PRESETS, ["debug", *words.split()])


def test_what_is_not_there_is_named_before_anything_is_trained(texts, tmp_path):
    def refused(**changes: Any) -> str:
        with pytest.raises(UserError) as error:
            finetune_moe.main(config(texts, "any", run_dir=tmp_path / str(time.monotonic_ns()), **changes))
        return str(error.value)

    assert "give a folder or Hub name, or take old_dataset=" in refused(model=None, old_dataset=None)
    assert "cannot be read" in refused(model=str(tmp_path))
    assert "the folder has no tokenizer. Give bytes" in refused(tokenizer=None)
    dense = tmp_path / "dense"
    dense_sizes = {"experts": 0, "top_k": 1, "expert_hidden_size": 16}
    causal_lm(language_model_config("qwen3_moe", **SIZES, **dense_sizes)).save_pretrained(dense)
    assert "has no experts that can be sharded" in refused(model=str(dense))


# --- chats -----------------------------------------------------------------------------------------------------------


def test_conversations_of_the_hubs_format_are_trained_on(texts, tmp_path, monkeypatch):
    monkeypatch.setenv("TOOLKIT_CACHE_DIR", str(tmp_path / "cache"))
    turns = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "It is a question."}]
    chats = tmp_path / "chats.jsonl"
    chats.write_text("".join(json.dumps({"messages": turns, "id": n}) + "\n" for n in range(60)))
    done = finetune_moe.main(
        config(texts, "any", run_dir=tmp_path / "run", dataset=str(chats), max_steps=2, merge=True)
    )
    assert done["dataset"] == "chats.jsonl"
    own: Any = {"run_dir": tmp_path / "own", "dataset": str(chats), "tokenizer": None, "max_steps": 2}
    own["assistant_only_loss"] = True
    assert finetune_moe.main(config(texts, "any", model=str(tmp_path / "run" / "merged"), **own))["steps"] == 2
    how: Any = {"tokenizer": "bytes", "block_size": 32, "batch_size": 32}
    data = load_text(str(chats), None, **how, on_main=lambda decide: decide())
    text = ByteTokenizer().decode(data.train.columns["tokens"][:, 1:].flatten().tolist())
    written = "<|im_start|>user\nWhat is it?<|im_end|>\n<|im_start|>assistant\nIt is a question.<|im_end|>\n"
    assert f"{written}\0{written}" in text
    for row, message in (
        ({"messages": [{"role": "user", "text": "no content"}]}, "a row of messages is"),
        (
            {"prompt": "one", "answer": "two"},
            "has no column named text, messages or prompt and completion, but prompt, answer",
        ),
    ):
        wrong = tmp_path / "wrong.jsonl"
        wrong.write_text(f"{json.dumps(row)}\n" * 60)
        with pytest.raises(UserError, match=message):
            load_text(str(wrong), None, **how, on_main=lambda decide: decide())
