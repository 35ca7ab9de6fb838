"""A tokenizer says the same in here and in plain transformers."""

from __future__ import annotations

import numpy as np
import pytest

from toolkit.data.tokenizer import ByteTokenizer, load_tokenizer
from toolkit.errors import UserError

TEXT = "It's 3 o'clock;\n\tnaïve  Ω 中文 🙂 Ā\x00\x7f "


def test_bytes_are_their_own_ids():
    tokenizer = ByteTokenizer()
    assert tokenizer.encode(b"AB\n").tolist() == [65, 66, 10]
    assert tokenizer.decode(tokenizer.encode(TEXT.encode()).tolist()) == TEXT
    assert tokenizer.decode([0xC3]) == "\N{REPLACEMENT CHARACTER}"


def test_plain_transformers_reads_the_byte_tokenizer(tmp_path):
    from transformers import AutoTokenizer

    ByteTokenizer().save_pretrained(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.encode(TEXT) == list(TEXT.encode())
    assert theirs.decode(list(TEXT.encode())) == TEXT
    every_byte = list(range(256))
    assert theirs.convert_tokens_to_ids(theirs.convert_ids_to_tokens(every_byte)) == every_byte


def test_the_byte_tokenizer_of_a_model_that_was_saved_separates_documents_as_before(tmp_path):
    ByteTokenizer().save_pretrained(tmp_path)
    again = load_tokenizer(str(tmp_path))
    assert (again.separator, again.vocab_size, again.chat) == (0, 256, ByteTokenizer.chat)
    assert again.encode(TEXT.encode()).tolist() == list(TEXT.encode())
    assert again.decode(list(TEXT.encode())) == TEXT


def test_a_saved_tokenizer_of_transformers_comes_back(tmp_path, saved_tokenizer):
    tokenizer = load_tokenizer(str(saved_tokenizer))
    ids = tokenizer.encode(b"the cat sat")
    assert tokenizer.decode(ids.tolist()) == "the cat sat"
    assert len(ids) < 11
    assert tokenizer.separator == tokenizer.vocab_size - 1
    tokenizer.save_pretrained(tmp_path)
    again = load_tokenizer(str(tmp_path))
    assert again.key == tokenizer.key != ByteTokenizer().key
    assert np.array_equal(again.encode(b"the cat sat"), ids)


def test_an_encoders_tokenizer_and_one_without_a_separator(tmp_path, saved_tokenizer):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(saved_tokenizer)
    theirs.eos_token = None
    theirs.save_pretrained(tmp_path / "none")
    with pytest.raises(UserError, match="has no end-of-text token, which separates documents"):
        load_tokenizer(str(tmp_path / "none"))
    theirs.sep_token = "the"
    theirs.save_pretrained(tmp_path / "encoder")
    assert load_tokenizer(str(tmp_path / "encoder")).separator == theirs.convert_tokens_to_ids("the")
