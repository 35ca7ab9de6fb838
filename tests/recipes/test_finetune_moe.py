"""The recipe finetune_moe. `docs/experts/adapters.md` runs the debug preset unchanged, whose base lm_moe trains."""

import json
import os
import re
import resource
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.support.processes import run_distributed
from recipes import finetune_moe
from tests.recipes.runs import (
    assert_equal_curves,
    bits_per_byte,
    load_bytes,
    losses,
    main_in_float64,
    metrics,
    results,
    save_language_model,
    write_corpus,
)
from tests.support.trainers import preempted_at
from toolkit.audit.checks import audit
from toolkit.data.tokenizer import ByteTokenizer
from toolkit.errors import Preempted, UserError
from toolkit.experts.moving.replan_options import ReplanOptions
from toolkit.integrations.peft.merged_weights import save_merged
from toolkit.integrations.transformers import causal_lm
from toolkit.run import cli
from toolkit.train.trainer import Trainer

ADAPTER, MERGED = "adapter/adapter_model.safetensors", "merged/model.safetensors"


def config(folder, run, **changes):
    settings = {
        "model": str(folder / "base"),
        "tokenizer": "bytes",
        "dataset": str(folder / "new.txt"),
        "old_dataset": str(folder / "old.txt"),
        "run_dir": folder / run,
        "eval_blocks": None,
        "max_steps": 12,
        "tracker": "none",
        "cpu": True,
    }
    return finetune_moe.debug().replace(**{**settings, **changes})


def train(config):
    main_in_float64(finetune_moe, config)


def merge_on_full_disk(*args):
    """Call `save_merged` with a file size limit below the size of the model."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        save_merged(*args)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def train_single(folder):
    os.environ["TOOLKIT_CACHE_DIR"] = str(folder / "cache")
    train(config(folder, "one", freeze_router=False))
    train(config(folder, "all weights", lora_rank=0, freeze_router=False, lr=1e-3))


def train_two(folder):
    os.environ["TOOLKIT_CACHE_DIR"] = str(folder / "cache")
    moved = {"replan": ReplanOptions(planner="swap", every=3, guarded=False), "merge": True, "freeze_router": False}
    train(config(folder, "two", **moved))
    recomputed = {"dense_parallel": "fsdp2", "gradient_checkpointing": True}
    train(config(folder, "fsdp2", freeze_router=False, merge=True, **recomputed))
    with preempted_at(7):
        train(config(folder, "stopped", **moved))
    with mock.patch("toolkit.integrations.peft.merged_weights.save_merged", merge_on_full_disk):
        with pytest.raises(UserError, match=r"/merged: cannot be written \(.*\). Make room"):
            train(config(folder, "stopped", **moved))
        assert not any((folder / "stopped" / "merged").iterdir())
    train(config(folder, "stopped", **moved))


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Folder with a base, a new text, and an old text."""
    folder = tmp_path_factory.mktemp("finetune_moe")
    write_corpus(folder / "new.txt")
    write_corpus(folder / "old.txt", ["exit", "alarum", "a flourish"])
    save_language_model(folder / "base")
    return folder


@pytest.fixture(scope="module")
def runs(texts):
    """Folder of the runs: "two" moves experts, "stopped" is resumed twice."""
    run_distributed(train_single, 1, texts)
    run_distributed(train_two, 2, texts)
    return texts


@pytest.mark.parametrize("run", ["two", "fsdp2"])
def test_two_processes_equal_one(run, runs):
    assert_equal_curves(runs / run, runs / "one")
    assert "train/grad_norm" in metrics(runs / run)[-1]
    assert losses(runs / "one")[-1] < losses(runs / "one")[0] - 0.05
    assert results(runs / "two")["migrated_experts"] > 0


def test_resumed_run_equals_uninterrupted_run(runs):
    assert metrics(runs / "stopped") == metrics(runs / "two")
    for weights in (ADAPTER, MERGED):
        assert (runs / "stopped" / weights).read_bytes() == (runs / "two" / weights).read_bytes()
    before = {name: value for name, value in results(runs / "two").items() if name.endswith("_at_start")}
    assert before.keys() >= {"test_bits_per_byte_at_start", "old_bits_per_byte_at_start"}
    assert results(runs / "stopped") | before == results(runs / "stopped")


@pytest.mark.parametrize("run", ["two", "fsdp2"])
def test_merged_model_in_transformers_has_equal_bits_per_byte(run, runs):
    assert not audit(runs / run / "adapter", runs / "base").findings
    assert (runs / run / "merged" / "tokenizer.json").exists()
    for text, name in (("new.txt", "test"), ("old.txt", "old")):
        bits = bits_per_byte(runs / run / "merged", load_bytes(runs / text))
        assert bits == pytest.approx(results(runs / run)[f"{name}_bits_per_byte"], rel=1e-5)
        assert bits != pytest.approx(results(runs / run)[f"{name}_bits_per_byte_at_start"], rel=1e-2)


def test_only_trained_weights_change(runs):
    base, full = (causal_lm(path).state_dict() for path in (runs / "base", runs / "all weights" / "model"))
    assert not any(torch.equal(value, full[name]) for name, value in base.items() if "norm" not in name)
    merged = causal_lm(runs / "two" / "merged").state_dict()
    changed = {name.rpartition("layers.0.")[2] for name, value in base.items() if not torch.equal(value, merged[name])}
    kinds = {"mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"}
    kinds |= {f"self_attn.{letter}_proj.weight" for letter in "qkvo"}
    assert {name for name in changed if "layers" not in name} == kinds


def test_bfloat16_base_learns_with_float32_adapters(texts, tmp_path):
    facts = finetune_moe.main(config(texts, "any", run_dir=tmp_path, dtype="bfloat16", merge=True))
    assert facts["test_bits_per_byte"] < facts["test_bits_per_byte_at_start"] - 0.02
    types = {path: {value.dtype for value in load_file(tmp_path / path).values()} for path in (ADAPTER, MERGED)}
    assert types == {ADAPTER: {torch.float32}, MERGED: {torch.bfloat16}}


def test_4bit_base_learns_and_is_extended(texts, tmp_path):
    quantized = config(texts, "any", run_dir=tmp_path, dtype="bfloat16", quantize="4bit", max_steps=10)
    finetune_moe.main(quantized)
    facts = finetune_moe.main(quantized.replace(extend=True, max_steps=12))
    assert facts["steps"] == 12
    assert facts["test_bits_per_byte"] < facts["test_bits_per_byte_at_start"]


def test_expected_memory_is_printed_and_raises_if_not_free(texts, tmp_path, monkeypatch, capsys):
    finetune_moe.main(config(texts, "any", run_dir=tmp_path / "run", max_steps=1))
    memory = r"^memory +0\.0\d GiB expected in each process, of [\d.]+ that are free$"
    assert re.search(memory, capsys.readouterr().out, re.MULTILINE)
    monkeypatch.setattr("toolkit.train.fine_tuning_memory.free_memory", lambda *_: 1000)
    with pytest.raises(UserError, match=r"force=False: each process is expected to take 0\.0 GiB and has 0\.0"):
        finetune_moe.main(config(texts, "any", run_dir=tmp_path / "error", max_steps=1))
    assert not (tmp_path / "error" / "checkpoints").exists()
    finetune_moe.main(config(texts, "any", run_dir=tmp_path / "forced", max_steps=1, force=True))


def test_comparison_trains_controls_and_resumes_after_stop(texts, tmp_path, monkeypatch):
    comparison = config(texts, "any", run_dir=tmp_path / "run", compare=True, max_steps=3, merge=True)
    fit, started = Trainer.fit, []

    def interrupted(self):
        started.append(self.run.folder.name)
        if len(started) == 3:
            raise Preempted("stopped")
        return fit(self)

    monkeypatch.setattr(Trainer, "fit", interrupted)
    with pytest.raises(Preempted):
        finetune_moe.main(comparison)
    facts = finetune_moe.main(comparison)
    assert started == ["run", "attention", "weights", "run", "weights"]
    rows = facts["comparison"]
    trained = ["nothing", "adapters of experts and attention", "adapters of attention", "all weights"]
    assert [row["trained"] for row in rows] == trained
    assert rows[0]["new text"] == facts["test_bits_per_byte_at_start"]
    assert rows[1]["old text"] == facts["old_bits_per_byte"]
    for row, name in zip(rows[2:], ("attention", "weights"), strict=True):
        control = results(tmp_path / "run" / "controls" / name)
        assert (row["new text"], row["parameters"]) == (control["test_bits_per_byte"], control["trained_parameters"])
        assert control["steps"] == facts["steps"]
    assert rows[3]["parameters"] == sum(p.numel() for p in causal_lm(texts / "base").parameters())
    assert len({row["new text"] for row in rows}) == 4
    summary = (tmp_path / "run" / "summary.txt").read_text()
    assert f"{rows[2]['new text']:.4f}" in summary
    assert "adapters of attention" in summary
    extended = finetune_moe.main(comparison.replace(extend=True, max_steps=4))
    steps = [results(tmp_path / "run" / "controls" / name)["steps"] for name in ("attention", "weights")]
    assert [extended["steps"], *steps] == [4, 4, 4]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--merge --lora-rank 0", "merge=True: there are no adapters"),
        ("--no-lora-experts --no-lora-attention", "neither experts nor attention"),
        ("--quantize 4bit --merge", "quantize='4bit': experts in four bits are frozen"),
    ],
)
def test_flags_that_leave_nothing_to_train_or_merge_raise(flags, message):
    with pytest.raises(UserError, match=message):
        cli.parse(finetune_moe.PRESETS, ["debug", *flags.split()])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None, "old_dataset": None}, "give a folder or Hub name, or take old_dataset="),
        ({"model": "."}, "cannot be read"),
        ({"tokenizer": None}, "the folder has no tokenizer. Give bytes"),
        ({"model": "dense"}, "has no experts that can be sharded"),
    ],
)
def test_unusable_base_raises(texts, tmp_path, monkeypatch, changes, message):
    monkeypatch.chdir(tmp_path)
    if changes.get("model") == "dense":
        save_language_model(tmp_path / "dense", experts=0, top_k=1)
    with pytest.raises(UserError, match=message):
        finetune_moe.main(config(texts, "any", **{"run_dir": tmp_path / "run", **changes}))


def test_conversations_are_formatted_and_trained(texts, tmp_path):
    turns = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "It is a question."}]
    chats = tmp_path / "chats.jsonl"
    chats.write_text("".join(json.dumps({"messages": turns, "id": n}) + "\n" for n in range(60)))
    settings = {"dataset": str(chats), "max_steps": 2}
    facts = finetune_moe.main(config(texts, "any", run_dir=tmp_path / "run", merge=True, **settings))
    assert facts["dataset"] == "chats.jsonl"
    settings |= {"model": str(tmp_path / "run" / "merged"), "tokenizer": None, "assistant_only_loss": True}
    assert finetune_moe.main(config(texts, "any", run_dir=tmp_path / "assistant", **settings))["steps"] == 2
    text = ByteTokenizer().decode(load_bytes(chats).train.columns["tokens"][:, 1:].flatten().tolist())
    written = "<|im_start|>user\nWhat is it?<|im_end|>\n<|im_start|>assistant\nIt is a question.<|im_end|>\n"
    assert f"{written}\0{written}" in text


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [{"role": "user", "text": "no content"}]}, "a row of messages is"),
        (
            {"prompt": "one", "answer": "two"},
            "has no column for the text, messages or prompt and completion, but prompt, answer",
        ),
    ],
)
def test_rows_without_text_or_conversation_raise(tmp_path, row, message):
    (tmp_path / "wrong.jsonl").write_text(f"{json.dumps(row)}\n" * 60)
    with pytest.raises(UserError, match=message):
        load_bytes(tmp_path / "wrong.jsonl")
