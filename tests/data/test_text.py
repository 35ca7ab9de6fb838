"""Text becomes blocks of which every token is predicted once, wherever it lies."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch

from toolkit.data.text import IGNORED, TextData, input_ids, load_text, split
from toolkit.errors import UserError


def load(
    dataset: str,
    folder: Path | None = None,
    *,
    block: int = 4,
    batch: int = 1,
    tokenizer: str = "bytes",
    answers: bool = False,
) -> TextData:
    sizes = {"block_size": block, "batch_size": batch, "assistant_only_loss": answers}
    return load_text(dataset, folder, tokenizer=tokenizer, **sizes, on_main=lambda decide: decide())


def targets(data: TextData, part: str = "train") -> str:
    """What is predicted, block after block."""
    tokens = getattr(data, part).columns["tokens"][:, 1:].flatten()
    return bytes(tokens[tokens >= 0].tolist()).decode()


def test_a_folder_with_one_file_holds_out_its_last_tenth(tmp_path):
    (tmp_path / "story.txt").write_text("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMN")  # 40 letters: 36 and 4
    data = load("folder", tmp_path, block=5)
    assert data.train.columns["tokens"].tolist() == [list(b"abcdef"), list(b"fghijk"), list(b"klmnop"), list(b"pqrstu"),
                                                     list(b"uvwxyz"), list(b"zABCDE"), list(b"EFGHIJ")]  # fmt: skip
    # Of the four held-out letters the first is not predicted, and the block is filled up.
    assert data.test.columns["tokens"].tolist() == [[*b"KLMN", IGNORED, IGNORED]]
    assert data.bytes_per_token == 1


def test_every_token_but_the_first_is_predicted_once(tmp_path):
    text = "".join(chr(97 + i % 26) for i in range(500))
    (tmp_path / "a.txt").write_text(text)
    data = load("folder", tmp_path, block=7)
    assert targets(data) == text[1 : 1 + 7 * (449 // 7)]
    assert targets(data, "test") == text[451:]


def test_training_blocks_beyond_the_last_whole_batch_are_left_out(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 1000)  # 900 to train on: 224 blocks of 4
    assert len(load("folder", tmp_path, batch=10).train) == 220


def test_many_documents_are_held_out_whole_with_a_zero_byte_between_them(tmp_path):
    for i in range(20):
        (tmp_path / f"{i:02d}.md").write_text(f"document {i:02d}.")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    data = load("folder", tmp_path, block=1)
    assert "document 09" not in targets(data)
    assert targets(data, "test") == "ocument 09.\0document 19."
    assert targets(data).count("\0") == 17
    assert "PNG" not in targets(data)


@pytest.mark.parametrize("name", ["folder", "rows.jsonl"])
def test_validation_text_is_held_out_of_the_training_text(name, tmp_path):
    if name == "folder":
        (tmp_path / "a.txt").write_text("".join(chr(33 + i % 90) for i in range(500)))
        where = ("folder", "folder:validation")
        folder = tmp_path
    else:
        (tmp_path / name).write_text("".join(json.dumps({"text": f"document {i:02d}."}) + "\n" for i in range(100)))
        where = (str(tmp_path / name), f"{tmp_path / name}:validation")
        folder = None
    whole, held = (load(dataset, folder, block=1) for dataset in where)
    assert held.name == f"{whole.name}:validation"
    assert 8 * len(held.test) < len(held.train) < 10 * len(held.test)
    if name == "folder":
        assert targets(whole) == targets(held) + targets(whole)[len(targets(held))] + targets(held, "test")
    else:
        both = (targets(held), targets(held, "test"))
        parts = sorted(document[-3:] for text in both for document in text.split("\0"))
        assert parts == sorted(document[-3:] for document in targets(whole).split("\0"))


def test_a_cut_does_not_go_through_a_character():
    train, test = split(["ä".encode() * 11])  # nine tenths of 22 bytes are 19, in the middle of the tenth letter
    assert (train[0].decode(), test[0].decode()) == ("ä" * 10, "ä")
    kept, held_out = split([np.full(10, 0x80)])  # ids are no bytes
    assert (len(kept[0]), len(held_out[0])) == (9, 1)


def test_auto_prefers_shakespeare_and_says_when_it_is_not_there(tmp_path, monkeypatch):
    data = load("auto", block=64)
    assert data.name.startswith("standard library of Python 3")
    assert "tinyshakespeare is not here" in (data.notice or "")
    assert "import" in targets(data, "test")
    (tmp_path / "tinyshakespeare").mkdir()
    (tmp_path / "tinyshakespeare" / "input.txt").write_text(
        "First Citizen:\nBefore we proceed any further, hear me speak.\n"
    )
    monkeypatch.setenv("TOOLKIT_DATA_DIR", str(tmp_path))
    data = load("auto")
    assert (data.name, data.notice) == ("tinyshakespeare", None)
    assert targets(data).startswith("irst Citizen:\nBefore")


def test_the_folder_of_data_may_begin_with_a_tilde_and_is_named_where_it_lacks_the_text(tmp_path, monkeypatch):
    monkeypatch.delenv("TOOLKIT_DATA_DIR", raising=False)
    with pytest.raises(UserError, match=r"tinyshakespeare': there is no data_dir and no \$TOOLKIT_DATA_DIR\. Give"):
        load("tinyshakespeare")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TOOLKIT_DATA_DIR", "~/data")
    with pytest.raises(UserError, match=f"tinyshakespeare': {tmp_path}/data holds no tinyshakespeare/input.txt. Give"):
        load("tinyshakespeare")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "input.txt").write_text("First Citizen:\nBefore we proceed any further, hear me speak.\n")
    assert load("tinyshakespeare").name == "tinyshakespeare"


@pytest.mark.parametrize("kind", ["txt", "jsonl", "parquet", "folder"])
def test_a_path_is_a_data_set(kind, tmp_path):
    texts = [f"{n:02d} a text" for n in range(10)]
    path = tmp_path / f"texts.{kind}"
    if kind == "folder":
        path.mkdir()
        for text in texts:
            (path / f"{text[:2]}.txt").write_text(text)
    elif kind == "parquet":
        datasets.Dataset.from_dict({"text": texts}).to_parquet(path)
    else:
        path.write_text("\n".join(texts if kind == "txt" else (json.dumps({"text": text}) for text in texts)))
    data = load(str(path), block=1)
    assert data.name == path.name
    assert targets(data).startswith("0 a text")
    assert targets(data, "test").endswith("9 a text")


def test_conversations_are_written_by_the_tokenizers_template(tmp_path, saved_tokenizer):
    chats = tmp_path / "chats.jsonl"
    row = {"messages": [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "the mat"}]}
    chats.write_text(f"{json.dumps(row)}\n" * 20)
    plain = load(str(chats), tokenizer=str(saved_tokenizer), block=2)
    template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    (saved_tokenizer / "chat_template.jinja").write_text(template)
    data = load(str(chats), tokenizer=str(saved_tokenizer), block=2)
    assert data.test.columns["tokens"].numel() < plain.test.columns["tokens"].numel()
    assert data.tokenizer.write(row["messages"]) == "the cat the mat "
    (saved_tokenizer / "chat_template.jinja").write_text("{{ raise_exception('system first') }}")
    with pytest.raises(UserError, match=r"a row of messages: cannot be read \(.*system first\)"):
        load(str(chats), tokenizer=str(saved_tokenizer), block=2)


MARKED = (
    "{% for m in messages %}{{ m.role + ':\\n' }}{% if m.role == 'assistant' %}{% generation %}{{ m.content + '.' }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %} {% endfor %}"
)


UNMARKED = (
    "{% for m in messages %}{{ m.role + ':\n' + m.content + '.\n' }}{% endfor %}"
    "{{ 'assistant:\n' if add_generation_prompt }}"
)
ENDS = {MARKED: ".", UNMARKED: ".\n"}
"""Of a turn of the assistant."""


@pytest.mark.parametrize("template", ["bytes", "ChatML", MARKED, UNMARKED])
def test_of_conversations_only_what_the_assistant_says_is_predicted(template, tmp_path, saved_tokenizer):
    name = "bytes"
    if template != "bytes":
        name = str(shutil.copytree(saved_tokenizer, tmp_path / "tokenizer"))
        (tmp_path / "tokenizer" / "chat_template.jinja").unlink(missing_ok=True)
    if template in ENDS:
        (tmp_path / "tokenizer" / "chat_template.jinja").write_text(template)
    said = ["the mat, näh", "on it"]
    turns = [("user", "the cat"), ("assistant", said[0]), ("user", "sat"), ("assistant", said[1])]
    row = {"messages": [{"role": role, "content": content} for role, content in turns]}
    (tmp_path / "chats.jsonl").write_text(f"{json.dumps(row)}\n" * 20)
    whole, data = (load(str(tmp_path / "chats.jsonl"), tokenizer=name, block=2, answers=each) for each in (False, True))
    read, ids = whole.train.columns["tokens"], data.train.columns["tokens"]
    assert torch.equal(input_ids(ids), read.int())
    answer = "".join(each + ENDS.get(template, "<|im_end|>") for each in said)
    learned = ids[:, 1:].flatten()
    predicted = data.tokenizer.decode(learned[learned >= 0].tolist())
    assert (18 * answer).startswith(predicted)
    assert len(predicted) > 17 * len(answer)
    test = data.test.columns["tokens"][:, 1:]
    assert data.bytes_per_token == 2 * len(answer.encode()) / int((test >= 0).sum())


def test_a_prompt_and_its_completion_are_a_conversation(tmp_path):
    turns = [{"role": role, "content": text} for role, text in (("user", "the cat"), ("assistant", "sat"))]
    rows = {
        "messages": {"messages": turns},
        "texts": {"prompt": "the cat", "completion": "sat"},
        "turns": {"prompt": turns[:1], "completion": turns[1:]},
    }
    found = []
    for name, row in rows.items():
        (tmp_path / f"{name}.jsonl").write_text(f"{json.dumps(row)}\n" * 20)
        found.append(load(str(tmp_path / f"{name}.jsonl"), block=4, answers=True))
    for data in found[1:]:
        assert torch.equal(data.train.columns["tokens"], found[0].train.columns["tokens"])
    assert found[0].notice == "messages.jsonl: it has no test split: every tenth of its 20 document(s) is held out."


def test_where_the_assistant_cannot_be_found_and_text_without_one_are_refused(tmp_path, saved_tokenizer):
    name = str(shutil.copytree(saved_tokenizer, tmp_path / "tokenizer"))
    template = "{% for m in messages %}{{ '!' if loop.last }}{{ m.content }} {% endfor %}"
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text(template)
    turns = [{"role": role, "content": "the mat"} for role in ("user", "assistant", "user")]
    for file, row, tokenizer, says in (
        ("chats.jsonl", {"messages": turns}, name, "otherwise when more follows: take one"),
        ("rows.jsonl", {"text": "the cat sat"}, name, "has no conversations, in messages or prompt and completion: le"),
        ("plain.txt", "the cat sat", "bytes", "plain.txt has no conversations"),
    ):
        (tmp_path / file).write_text(f"{row if isinstance(row, str) else json.dumps(row)}\n" * 20)
        with pytest.raises(UserError, match=f"^assistant_only_loss=True: .*{says}"):
            load(str(tmp_path / file), tokenizer=tokenizer, answers=True)


@pytest.mark.parametrize("held_out", ["validation", "test", None])
def test_a_data_set_in_a_folder_or_of_the_hub_is_read_by_its_splits(held_out, tmp_path):
    def write(name: str, texts: list[str]) -> None:
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": t, "label": 1}) + "\n" for t in texts))

    write("train", [f"train {i:02d}" for i in range(10)])
    if held_out:
        write(held_out, ["held out"])
    for data in (load("folder", tmp_path, block=1), load(str(tmp_path), block=1)):
        assert targets(data).startswith("rain 00\0train 01")
        assert targets(data, "test") == ("eld out" if held_out else "rain 09")


def test_prompts_are_beginnings_of_full_blocks(tmp_path):
    (tmp_path / "a.txt").write_text("." * 900 + "abcdefghij" * 10)
    prompts = load("folder", tmp_path, block=10).prompts(3, 4)
    assert [bytes(row).decode() for row in prompts.tolist()] == ["abcd", "abcd", "abcd"]
    assert prompts.dtype == torch.int64
    assert len(load("folder", tmp_path, block=99).prompts(3, 4)) == 1


def test_a_tokenizer_of_transformers_encodes_and_counts_its_bytes(tmp_path, saved_tokenizer):
    (tmp_path / "a.txt").write_text("the cat sat on the mat. " * 50)
    data = load("folder", tmp_path, tokenizer=str(saved_tokenizer))
    test = data.test.columns["tokens"].flatten()
    tokens = 1 + int((data.test.columns["tokens"][:, 1:] >= 0).sum())
    assert data.bytes_per_token == 120 / tokens > 1
    assert int(test.max()) < data.tokenizer.vocab_size
    assert data.tokenizer.decode(data.train.columns["tokens"][0].tolist()).startswith("the cat")
