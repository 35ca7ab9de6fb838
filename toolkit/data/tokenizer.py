"""Text to tokens and back: bytes as they are, or any tokenizer of transformers."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.data.hub import pretrained_folder
from toolkit.errors import UserError, reading

BYTES = "bytes"
FILES = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken")
"""Files of a tokenizer on the Hub."""
TABLES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")
"""A tokenizer has at least one of these."""
MESSAGES = "messages"
"""The column of conversations: lists of dicts with "role" and "content", as chat templates take them."""
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}"
    "{% endfor %}"
)
"""Chat template for tokenizers without one (OpenAI 2023). It marks the assistant's tokens."""


def load_tokenizer(name: str) -> Tokenizer:
    """Load "bytes", or the tokenizer in a folder or on the Hub. Raises UserError if there is none."""
    return ByteTokenizer() if name == BYTES else Tokenizer(name)


def write_conversation(
    tokenizer: Tokenizer, messages: Any, what: str, *, answers: bool = False
) -> bytes | NDArray[np.int32]:
    """Return the messages of one row as text, or with `answers` as ids (see `Tokenizer.encode_answers`). Raises
    UserError, which begins with `what`, if they are not a conversation."""
    valid = isinstance(messages, list) and all(
        isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
        for message in messages
    )
    if not messages or not valid:
        raise UserError(
            f"{what}: a row of {MESSAGES} is {str(messages)[:80]!r}. Use a list of dicts with role and content."
        )
    with reading(f"{what}: a row of {MESSAGES}", "Use another row or chat template."):
        return tokenizer.encode_answers(messages) if answers else tokenizer.write(messages).encode()


class Tokenizer:
    """Text to token ids and back, with a tokenizer of transformers.

    Its end-of-text token separates documents, or [SEP] of an encoder's tokenizer.
    """

    vocab_size: int
    """Ids are below this."""
    separator: int
    """The id between two documents."""
    key: str
    """Cache key, which changes when the same text would become other ids."""
    chat: str
    """Chat template of the tokenizer, or `CHATML`."""

    def __init__(self, name: str):
        from transformers import AutoTokenizer

        folder = pretrained_folder("tokenizer", name, wanted=FILES, needed=TABLES)
        if not any(match for pattern in TABLES for match in Path(folder).glob(pattern)):
            # From a folder with only a model configuration, transformers would make a tokenizer without words.
            raise UserError(
                f"tokenizer={name!r}: the folder has no tokenizer. Give bytes, another folder or a Hub name."
            )
        with reading(f"tokenizer={name!r}", "Give bytes, a folder or a Hub name."):
            self._inner: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        separators = [id for id in (self._inner.eos_token_id, self._inner.sep_token_id) if id is not None]
        if not separators:
            raise UserError(
                f"tokenizer={name!r}: has no end-of-text token, which separates documents. Choose another, or bytes."
            )
        self.vocab_size = len(self._inner)
        self.separator = int(separators[0])
        probe = repr((sorted(self._inner.get_vocab().items()), self.encode(_PROBE).tolist()))
        self.key = hashlib.sha256(probe.encode()).hexdigest()[:16]
        self.chat = str(self._inner.chat_template or CHATML)

    def encode(self, document: bytes) -> NDArray[Any]:
        """Return the ids, shape (N,), in a type that holds `vocab_size`. Raises UserError if it is not UTF-8."""
        try:
            text = document.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(
                f"dataset: it is not UTF-8 at {document[error.start : error.start + 8]!r}. "
                "Convert it, or use tokenizer='bytes'."
            ) from None
        return np.array(self._inner.encode(text, add_special_tokens=False, verbose=False), dtype=np.int32)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._inner.decode(ids))

    def write(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return a conversation as text."""
        template = CHATML if self.chat == CHATML else None
        return str(self._inner.apply_chat_template(list(messages), chat_template=template, tokenize=False))

    def encode_answers(self, messages: Sequence[Mapping[str, str]]) -> NDArray[np.int32]:
        """Return the ids of a conversation, `~id` for tokens that are not the assistant's.

        Raises:
            UserError: The chat template does not identify the assistant's tokens.
        """
        if not re.search(r"{%-?\s*generation\b", self.chat):
            return self._encode_between(messages)
        marked = self._inner.apply_chat_template(
            list(messages), chat_template=self.chat, return_dict=True, return_assistant_tokens_mask=True
        )
        ids = np.array(marked["input_ids"], dtype=np.int32)
        return np.where(np.array(marked["assistant_masks"], dtype=bool), ids, ~ids)

    def _encode_between(self, messages: Sequence[Mapping[str, str]]) -> NDArray[np.int32]:
        """Encode like `encode_answers` for a template that does not mark the assistant's tokens: they lie between the
        generation prompt and the end of the turn."""
        whole = self.write(messages)
        encoded = self._inner(whole, add_special_tokens=False, return_offsets_mapping=True)
        begins = np.array([begin for begin, _ in encoded["offset_mapping"]])
        said = np.zeros(len(begins), dtype=bool)
        for turn in (turn for turn, message in enumerate(messages) if message["role"] == "assistant"):
            prompt = self._inner.apply_chat_template(list(messages[:turn]), tokenize=False, add_generation_prompt=True)
            done = self.write(messages[: turn + 1])
            if not (whole.startswith(done) and done.startswith(prompt)):
                remedy = (
                    "the tokenizer's chat template writes the beginning of a conversation otherwise when more follows: "
                    "take one that marks what the assistant says with {% generation %}, or leave it out"
                )
                raise UserError(field="assistant_only_loss", value=True, remedy=remedy)
            said |= (begins >= len(prompt)) & (begins < len(done))
        ids = np.array(encoded["input_ids"], dtype=np.int32)
        return np.where(said, ids, ~ids)

    def save_pretrained(self, folder: Path) -> None:
        """Save for `transformers.AutoTokenizer.from_pretrained(folder)`."""
        self._inner.save_pretrained(folder)


class ByteTokenizer(Tokenizer):
    """One token per byte; the byte 0, which text does not have, ends a document.

    In transformers it is byte-level BPE without merges, whose end-of-text token is the byte 0.
    """

    vocab_size, separator, key, chat = 256, 0, BYTES, CHATML

    def __init__(self) -> None:
        """Load nothing: encoding needs no library."""

    @cached_property
    def _inner(self) -> Any:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        # The separator is a token by itself, because the text may have its letter.
        end = chr(self.separator)
        letters = bytes_to_unicode() | {self.separator: end}
        bpe = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in letters.items()}, merges=[]))
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        bpe.decoder = decoders.ByteLevel()
        settings: Any = {"eos_token": end, "clean_up_tokenization_spaces": False}
        return PreTrainedTokenizerFast(tokenizer_object=bpe, **settings)

    def encode(self, document: bytes) -> NDArray[Any]:
        return np.frombuffer(document, dtype=np.uint8)


_PROBE = "It's 3 o'clock;\n\tnaïve  Ω 中文 🙂".encode()
