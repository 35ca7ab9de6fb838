"""Tokenizers of bytes and of transformers."""

import numpy as np
import pytest
from transformers import AutoTokenizer

from toolkit.data.tokenizer import ByteTokenizer, load_tokenizer
from toolkit.errors import UserError

TEXT = "It's 3 o'clock;\n\tnaïve  Ω 中文 🙂 Ā\x00\x7f "


def test_byte_tokenizer_ids_are_bytes():
    tokenizer = ByteTokenizer()
    assert tokenizer.encode(b"AB\n").tolist() == [65, 66, 10]
    assert tokenizer.decode(tokenizer.encode(TEXT.encode()).tolist()) == TEXT
    assert tokenizer.decode([0xC3]) == "\N{REPLACEMENT CHARACTER}"


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
