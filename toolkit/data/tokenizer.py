"""Text to tokens and back: bytes as they are, or any tokenizer of transformers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from toolkit.data.hub import pretrained_folder
from toolkit.errors import UserError

BYTES = "bytes"
FILES = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken")
"""Files of a tokenizer on the Hub."""
TABLES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")
"""Of these it has at least one."""


class Tokenizer(Protocol):
    vocab_size: int
    """Ids are below this."""
    separator: int
    """The id between two documents."""
    key: str
    """Changes when the same text would become other ids."""

    def encode(self, document: bytes) -> NDArray[Any]:
        """1-d ids, in a type that holds `vocab_size`. Raises UserError for bytes that are no text to it."""
        ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def save_pretrained(self, folder: Path) -> None:
        """Write what `transformers.AutoTokenizer.from_pretrained(folder)` reads."""
        ...


def load_tokenizer(name: str) -> Tokenizer:
    """ "bytes", or the tokenizer in a folder or on the Hub. Raises UserError where there is none."""
    return ByteTokenizer() if name == BYTES else PretrainedTokenizer(name)


class ByteTokenizer:
    """One token per byte; the byte 0, which text does not have, ends a document."""

    vocab_size, separator, key = 256, 0, BYTES

    def encode(self, document: bytes) -> NDArray[np.uint8]:
        return np.frombuffer(document, dtype=np.uint8)

    def decode(self, ids: Sequence[int]) -> str:
        """Bytes that are not UTF-8 become the replacement character."""
        return bytes(ids).decode("utf-8", errors="replace")

    def save_pretrained(self, folder: Path) -> None:
        """As byte-level BPE without merges."""
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        bpe = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in enumerate(_LETTERS)}, merges=[]))
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        bpe.decoder = decoders.ByteLevel()
        PreTrainedTokenizerFast(tokenizer_object=bpe, clean_up_tokenization_spaces=False).save_pretrained(folder)


def _letters() -> list[str]:
    """The letter that byte-level BPE writes for each byte (Radford et al. 2019, the code of GPT-2): the byte's own in
    Latin-1 where that can be seen, else the next one from 256 on."""
    seen = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = [byte for byte in range(256) if byte not in seen]
    return [chr(byte) if byte in seen else chr(256 + hidden.index(byte)) for byte in range(256)]


_LETTERS = _letters()


class PretrainedTokenizer:
    """A tokenizer of transformers; its end-of-text token separates documents."""

    def __init__(self, name: str):
        from transformers import AutoTokenizer

        folder = pretrained_folder("--tokenizer", name, wanted=FILES, needed=TABLES)
        try:
            self._inner: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        # Whatever a half-written file makes it raise: there is no tokenizer.
        except Exception as error:
            reason = " ".join(str(error).split())[:120].rstrip(". ")
            raise UserError(
                f"--tokenizer {name}: cannot be loaded ({reason}): give bytes, a folder or a Hub name."
            ) from error
        if self._inner.eos_token_id is None:
            raise UserError(f"--tokenizer {name}: has no end-of-text token to put between documents: take another.")
        self.vocab_size = len(self._inner)
        self.separator = int(self._inner.eos_token_id)
        probe = repr((sorted(self._inner.get_vocab().items()), self.encode(_PROBE).tolist()))
        self.key = hashlib.sha256(probe.encode()).hexdigest()[:16]

    def encode(self, document: bytes) -> NDArray[np.int32]:
        try:
            text = document.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(
                f"the data set is not UTF-8 at {document[error.start : error.start + 8]!r}: "
                "convert it, or use --tokenizer bytes."
            ) from None
        return np.array(self._inner.encode(text, add_special_tokens=False, verbose=False), dtype=np.int32)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._inner.decode(ids))

    def save_pretrained(self, folder: Path) -> None:
        self._inner.save_pretrained(folder)


_PROBE = "It's 3 o'clock;\n\tnaïve  Ω 中文 🙂".encode()
