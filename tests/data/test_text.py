"""Text data sets: blocks, held-out parts, conversations and tokenizers."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from toolkit.data.text import IGNORED, TextData, input_ids, load_text, split
from toolkit.data.tokenizer import ByteTokenizer, load_tokenizer
from toolkit.errors import UserError

SHAKESPEARE = "First Citizen:\nBefore we proceed any further, hear me speak.\n"


def load(dataset: str | Path, folder: Path | None = None, *, block: int = 4, **options: Any) -> TextData:
    options = {"tokenizer": "bytes", "batch_size": 1, **options}
    return load_text(str(dataset), folder, block_size=block, **options, on_main=lambda decide: decide())


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def targets(data: TextData, part: str = "train") -> str:
    """Return the target tokens of all blocks as text."""
    tokens = getattr(data, part).columns["tokens"][:, 1:].flatten()
    return bytes(tokens[tokens >= 0].tolist()).decode()


def test_last_tenth_of_a_single_file_is_held_out(tmp_path):
    (tmp_path / "story.txt").write_text("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMN")  # 40 letters: 36 and 4
    data = load("folder", tmp_path, block=5)
    blocks = [bytes(row).decode() for row in data.train.columns["tokens"].tolist()]
    assert blocks == ["abcdef", "fghijk", "klmnop", "pqrstu", "uvwxyz", "zABCDE", "EFGHIJ"]
    # The first of the four held-out letters is no target, and the block is padded.
    assert data.test.columns["tokens"].tolist() == [[*b"KLMN", IGNORED, IGNORED]]
    assert data.bytes_per_token == 1
    assert len(load("folder", tmp_path, block=5, batch_size=2).train) == 6, "complete batches"


def test_held_out_documents_are_complete_and_separated_by_zero_bytes(tmp_path):
    for i in range(20):
        (tmp_path / f"{i:02d}.md").write_text(f"document {i:02d}.")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    data = load("folder", tmp_path, block=1)
    assert "document 09" not in targets(data)
    assert targets(data, "test") == "ocument 09.\0document 19."
    assert targets(data).count("\0") == 17
    assert "PNG" not in targets(data)


@pytest.mark.parametrize("kind", ["folder", "rows"])
def test_validation_text_is_a_part_of_the_training_text(kind, tmp_path):
    if kind == "folder":
        dataset, folder = "folder", tmp_path
        (tmp_path / "a.txt").write_text("".join(chr(33 + i % 90) for i in range(500)))
    else:
        dataset, folder = tmp_path / "rows.jsonl", None
        write_rows(dataset, ({"text": f"document {i:02d}."} for i in range(100)))
    full, held = (load(name, folder, block=1) for name in (dataset, f"{dataset}:validation"))
    assert held.name == f"{full.name}:validation"
    assert 8 * len(held.test) < len(held.train) < 10 * len(held.test)
    train, validation = targets(held), targets(held, "test")
    if kind == "folder":
        assert targets(full) == train + targets(full)[len(train)] + validation
    else:
        ends = sorted(document[-3:] for text in (train, validation) for document in text.split("\0"))
        assert ends == sorted(document[-3:] for document in targets(full).split("\0"))


def test_split_keeps_characters_intact():
    train, test = split(["ä".encode() * 11])  # nine tenths of 22 bytes end inside the tenth letter
    assert (train[0].decode(), test[0].decode()) == ("ä" * 10, "ä")
    kept, held_out = split([np.full(10, 0x80)])  # token ids, not bytes
    assert (len(kept[0]), len(held_out[0])) == (9, 1)


def test_auto_loads_shakespeare_or_the_standard_library(tmp_path, monkeypatch):
    data = load("auto", block=64)
    assert data.name.startswith("standard library of Python 3")
    assert "tinyshakespeare is not here" in (data.notice or "")
    assert "import" in targets(data, "test")
    (tmp_path / "tinyshakespeare").mkdir()
    (tmp_path / "tinyshakespeare" / "input.txt").write_text(SHAKESPEARE)
    monkeypatch.setenv("TOOLKIT_DATA_DIR", str(tmp_path))
    data = load("auto")
    assert (data.name, data.notice) == ("tinyshakespeare", None)
    assert targets(data).startswith(SHAKESPEARE[1:20])


def test_missing_shakespeare_raises_with_the_expanded_data_dir(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"tinyshakespeare': there is no data_dir and no \$TOOLKIT_DATA_DIR\. Give"):
        load("tinyshakespeare")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TOOLKIT_DATA_DIR", "~/data")
    with pytest.raises(UserError, match=f"tinyshakespeare': {tmp_path}/data holds no tinyshakespeare/input.txt. Give"):
        load("tinyshakespeare")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "input.txt").write_text(SHAKESPEARE)
    assert load("tinyshakespeare").name == "tinyshakespeare"


@pytest.mark.parametrize("kind", ["txt", "jsonl", "parquet", "folder"])
def test_path_of_any_format_is_a_data_set(kind, tmp_path):
    texts = [f"{n:02d} a text" for n in range(10)]
    path = tmp_path / f"texts.{kind}"
    if kind == "folder":
        path.mkdir()
        for text in texts:
            (path / f"{text[:2]}.txt").write_text(text)
    elif kind == "parquet":
        datasets.Dataset.from_dict({"text": texts}).to_parquet(path)
    elif kind == "jsonl":
        write_rows(path, ({"text": text} for text in texts))
    else:
        path.write_text("\n".join(texts))
    data = load(path, block=1)
    assert data.name == path.name
    assert targets(data).startswith("0 a text")
    assert targets(data, "test").endswith("9 a text")


@pytest.fixture
def template(tmp_path: Path, saved_tokenizer: Path) -> Path:
    """The chat template of a copy of the saved tokenizer, not yet written."""
    shutil.copytree(saved_tokenizer, tmp_path / "tokenizer")
    return tmp_path / "tokenizer" / "chat_template.jinja"


def turns(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in pairs]


def test_conversations_use_the_chat_template(tmp_path, template):
    messages = turns(("user", "the cat"), ("assistant", "the mat"))
    chats = write_rows(tmp_path / "chats.jsonl", [{"messages": messages}] * 20)
    options = {"tokenizer": str(template.parent), "block": 2}
    without = load(chats, **options)
    template.write_text("{% for m in messages %}{{ m['content'] }} {% endfor %}")
    data = load(chats, **options)
    assert data.test.columns["tokens"].numel() < without.test.columns["tokens"].numel()
    assert data.tokenizer.write(messages) == "the cat the mat "
    template.write_text("{{ raise_exception('system first') }}")
    with pytest.raises(UserError, match=r"a row of messages: cannot be read \(.*system first\)"):
        load(chats, **options)


MARKED = (
    "{% for m in messages %}{{ m.role + ':\\n' }}{% if m.role == 'assistant' %}{% generation %}{{ m.content + '.' }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %} {% endfor %}"
)
UNMARKED = (
    "{% for m in messages %}{{ m.role + ':\n' + m.content + '.\n' }}{% endfor %}"
    "{{ 'assistant:\n' if add_generation_prompt }}"
)
ENDS = {MARKED: ".", UNMARKED: ".\n"}
"""Text after each assistant message."""


@pytest.mark.parametrize("kind", ["bytes", "ChatML", MARKED, UNMARKED], ids=["bytes", "ChatML", "marked", "unmarked"])
def test_assistant_only_loss_has_only_answers_as_targets(kind, tmp_path, template):
    tokenizer = "bytes" if kind == "bytes" else str(template.parent)
    if kind in ENDS:
        template.write_text(kind)
    answers = ["the mat, näh", "on it"]
    messages = turns(("user", "the cat"), ("assistant", answers[0]), ("user", "sat"), ("assistant", answers[1]))
    chats = write_rows(tmp_path / "chats.jsonl", [{"messages": messages}] * 20)
    full, data = (load(chats, tokenizer=tokenizer, block=2, assistant_only_loss=only) for only in (False, True))
    ids = data.train.columns["tokens"]
    assert torch.equal(input_ids(ids), full.train.columns["tokens"].int())
    answer = "".join(each + ENDS.get(kind, "<|im_end|>") for each in answers)
    learned = ids[:, 1:].flatten()
    decoded = data.tokenizer.decode(learned[learned >= 0].tolist())
    assert (18 * answer).startswith(decoded)
    assert len(decoded) > 17 * len(answer)
    test = data.test.columns["tokens"][:, 1:]
    assert data.bytes_per_token == 2 * len(answer.encode()) / int((test >= 0).sum())


def test_prompt_and_completion_equal_a_conversation(tmp_path):
    messages = turns(("user", "the cat"), ("assistant", "sat"))
    chat = load(write_rows(tmp_path / "chat.jsonl", [{"messages": messages}] * 20), assistant_only_loss=True)
    assert chat.notice == "chat.jsonl: it has no test split: every tenth of its 20 document(s) is held out."
    for prompt, completion in (("the cat", "sat"), (messages[:1], messages[1:])):
        rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": prompt, "completion": completion}] * 20)
        data = load(rows, assistant_only_loss=True)
        assert torch.equal(data.train.columns["tokens"], chat.train.columns["tokens"])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": turns(("user", "a"), ("assistant", "b"), ("user", "c"))}, "when more follows: take one"),
        ({"text": "the cat sat"}, "has no conversations, in messages or prompt and completion: le"),
        (None, "plain.txt has no conversations"),
    ],
    ids=["template", "rows", "text"],
)
def test_assistant_only_loss_without_answers_raises(row, message, tmp_path, template):
    template.write_text("{% for m in messages %}{{ '!' if loop.last }}{{ m.content }} {% endfor %}")
    (tmp_path / "plain.txt").write_text("the cat sat\n" * 20)
    dataset = write_rows(tmp_path / "rows.jsonl", [row] * 20) if row else tmp_path / "plain.txt"
    with pytest.raises(UserError, match=f"^assistant_only_loss=True: .*{message}"):
        load(dataset, tokenizer=str(template.parent) if row else "bytes", assistant_only_loss=True)


@pytest.mark.parametrize("held_out", ["validation", "test", None])
def test_splits_of_a_folder_are_read(held_out, tmp_path):
    write_rows(tmp_path / "train.jsonl", ({"text": f"train {i:02d}", "label": 1} for i in range(10)))
    if held_out:
        write_rows(tmp_path / f"{held_out}.jsonl", [{"text": "held out", "label": 1}])
    for data in (load("folder", tmp_path, block=1), load(tmp_path, block=1)):
        assert targets(data).startswith("rain 00\0train 01")
        assert targets(data, "test") == ("eld out" if held_out else "rain 09")


def test_prompts_are_starts_of_full_blocks(tmp_path):
    (tmp_path / "a.txt").write_text("." * 900 + "abcdefghij" * 10)
    prompts = load("folder", tmp_path, block=10).prompts(3, 4)
    assert [bytes(row).decode() for row in prompts.tolist()] == ["abcd", "abcd", "abcd"]
    assert prompts.dtype == torch.int64
    assert len(load("folder", tmp_path, block=99).prompts(3, 4)) == 1


def test_transformers_tokenizer_has_bytes_per_token(tmp_path, saved_tokenizer):
    (tmp_path / "a.txt").write_text("the cat sat on the mat. " * 50)
    data = load("folder", tmp_path, tokenizer=str(saved_tokenizer))
    test = data.test.columns["tokens"].flatten()
    tokens = 1 + int((data.test.columns["tokens"][:, 1:] >= 0).sum())
    assert data.bytes_per_token == 120 / tokens > 1
    assert int(test.max()) < data.tokenizer.vocab_size
    assert data.tokenizer.decode(data.train.columns["tokens"][0].tolist()).startswith("the cat")


TEXT = "It's 3 o'clock;\n\tnaïve  Ω 中文 🙂 Ā\x00\x7f "


def test_saved_byte_tokenizer_loads_here_and_in_transformers(tmp_path):
    ByteTokenizer().save_pretrained(tmp_path)
    ids = list(TEXT.encode())
    auto = AutoTokenizer.from_pretrained(tmp_path)
    assert auto.encode(TEXT) == ids
    assert auto.decode(ids) == TEXT
    assert auto.convert_tokens_to_ids(auto.convert_ids_to_tokens(list(range(256)))) == list(range(256))
    loaded = load_tokenizer(str(tmp_path))
    assert (loaded.separator, loaded.vocab_size, loaded.chat) == (0, 256, ByteTokenizer.chat)
    assert loaded.encode(TEXT.encode()).tolist() == ids
    assert loaded.decode(ids) == TEXT


def test_saved_transformers_tokenizer_loads(tmp_path, saved_tokenizer):
    tokenizer = load_tokenizer(str(saved_tokenizer))
    ids = tokenizer.encode(b"the cat sat")
    assert tokenizer.decode(ids.tolist()) == "the cat sat"
    assert len(ids) < 11
    assert tokenizer.separator == tokenizer.vocab_size - 1
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    assert loaded.key == tokenizer.key != ByteTokenizer().key
    assert np.array_equal(loaded.encode(b"the cat sat"), ids)


def test_separator_is_the_sep_token_or_raises(tmp_path, saved_tokenizer):
    auto = AutoTokenizer.from_pretrained(saved_tokenizer)
    auto.eos_token = None
    auto.save_pretrained(tmp_path / "none")
    with pytest.raises(UserError, match="has no end-of-text token, which separates documents"):
        load_tokenizer(str(tmp_path / "none"))
    auto.sep_token = "the"
    auto.save_pretrained(tmp_path / "encoder")
    assert load_tokenizer(str(tmp_path / "encoder")).separator == auto.convert_tokens_to_ids("the")
