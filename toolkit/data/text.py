"""Text in packed blocks: documents from a folder, the Hub or Python's own sources, encoded once."""

from __future__ import annotations

import hashlib
import math
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from toolkit.data.cache import OnMain, Source, shared_columns
from toolkit.data.files import NotFoundHere, content_key, data_folder
from toolkit.data.images import VALIDATION
from toolkit.data.rows import find_column, load_splits
from toolkit.data.table import TensorTable
from toolkit.data.tokenizer import MESSAGES, Tokenizer, load_tokenizer, write_conversation
from toolkit.errors import UserError
from toolkit.progress_bar import progress

SHAKESPEARE, STDLIB, FOLDER, REFERENCE, PROSE = "tinyshakespeare", "stdlib", "folder", "reference", "prose"
SUFFIXES = {".txt", ".text", ".md", ".rst", ".tex", ".py"}
"""Suffixes of the files that are read as text."""
ROWS = (".jsonl", ".parquet")
"""Suffixes of the files that hold rows."""
IGNORED = -1
"""Padding of the last held-out block. Tokens that are read but not predicted are negative too: see `input_ids`."""
PAIR = ("prompt", "completion")
"""Columns that are a conversation together."""
MANY = 10
"""Minimum number of documents to hold out every tenth; with fewer, the last tenth of each is held out."""
CACHE_FORMAT = 3
"""Version of the cache format; bump it when the cached values of the same text change."""
Document = bytes | NDArray[np.int32]
"""A text, or the ids from `Tokenizer.encode_answers` for a conversation with assistant-only loss."""
D = TypeVar("D", bytes, Document)


def input_ids(tokens: Tensor) -> Tensor:
    """Return the input ids of `tokens`, in which `~id` marks a token that is not predicted."""
    return torch.where(tokens < 0, ~tokens, tokens)


@dataclass(frozen=True)
class TextData:
    """Two tables with the column "tokens" (N, block + 1), whose neighbours share one token: the last of a block is the
    first of the next, so that each token but the very first is predicted exactly once."""

    name: str
    train: TensorTable
    test: TensorTable
    """Held-out blocks, the last one padded with `IGNORED` so that all held-out text is evaluated."""
    tokenizer: Tokenizer
    bytes_per_token: float
    """The mean over the held-out text."""
    notice: str | None = None
    """A sentence for the user, when this is not the text that was asked for."""
    validation: TensorTable | None = None
    """Validation blocks for model selection, padded like `test` and disjoint from `train` and `test`."""

    def prompts(self, count: int, length: int) -> Tensor:
        """Return the first tokens of evenly spaced held-out blocks, int64 (count, length); fewer for a short text."""
        return input_ids(self.some_test(count).columns["tokens"][:, :length].long())

    def some_test(self, count: int | None) -> TensorTable:
        """Return `count` full, evenly spaced held-out blocks, fewer if the text is short. None: all blocks."""
        return _some(self.test, count)

    def some_validation(self, count: int | None) -> TensorTable | None:
        """Return `count` validation blocks like `some_test`, or None without validation text."""
        return None if self.validation is None else _some(self.validation, count)


def _some(blocks: TensorTable, count: int | None) -> TensorTable:
    if count is None:
        return blocks
    full = max(1, len(blocks) - 1)  # the last one may be filled up
    rows = torch.arange(min(count, full)) * full // min(count, full)
    return TensorTable(**blocks[rows])


@dataclass(frozen=True)
class _Corpus:
    """A text that is found but not yet read."""

    name: str
    key: str
    """Cache key, which changes with the content."""
    splits: Mapping[str, Callable[[], list[Any]]]
    """Functions that read the documents of "train" and, if the text has them, of "test" and "validation"."""
    notice: str | None = None
    has_conversations: bool = False


def load_text(
    dataset: str,
    data_dir: str | Path | None,
    *,
    tokenizer: str,
    block_size: int,
    batch_size: int,
    validation: bool = False,
    assistant_only_loss: bool = False,
    on_main: OnMain,
) -> TextData:
    """Load text as blocks of tokens.

    Training blocks after the last full batch are dropped, because some rank would get an empty batch, which
    transformers do not support.

    Args:
        dataset: "tinyshakespeare"; "folder", all text files below `data_dir`; "stdlib", the sources of Python's
            standard library; "reference", the language reference that pydoc shows; a file or folder of text, Parquet or
            JSON lines; "owner/name" or "owner/name:config" of the Hub; "auto": the text in `data_dir`, else
            tinyshakespeare in $TOOLKIT_DATA_DIR, else the standard library; or "prose", which ends with the language
            reference instead. Rows have a column `text`, or conversations in a column `messages` or in `prompt` and
            `completion`, which the tokenizer's chat template turns into text. With the suffix `VALIDATION`, only the
            training text is used, and a part of it is held out for model selection.
        data_dir: Folder with the text, for data sets that are searched for.
        tokenizer: "bytes", or the tokenizer in a folder or on the Hub.
        block_size: Tokens that a block predicts.
        batch_size: Blocks per optimizer step.
        validation: Also hold out validation text: the split `validation` of a data set that also has a split `test`,
            else a tenth of the training text.
        assistant_only_loss: Compute the loss only on the assistant's turns, including the end of each turn.
        on_main: `Run.on_main_and_share`.

    Returns:
        The tables of training and held-out blocks, and their tokenizer.

    Raises:
        UserError: On every rank, if the text is not found, not readable or too short, or if `assistant_only_loss` is
            set without conversations or with a chat template that does not identify the assistant's tokens.
    """
    on_validation = dataset.endswith(VALIDATION)
    validation = validation and not on_validation
    load = cache(partial(load_tokenizer, tokenizer))

    def find() -> Source:
        corpus = _choose(dataset.removesuffix(VALIDATION), data_dir, partial(_rows, load, assistant_only_loss))
        if assistant_only_loss and not corpus.has_conversations:
            remedy = f"{corpus.name} has no conversations, in {MESSAGES} or {' and '.join(PAIR)}: leave it out"
            raise UserError(field="assistant_only_loss", value=True, remedy=remedy)
        written = load().key, load().chat, assistant_only_loss
        known = repr((corpus.key, *written, on_validation, validation, CACHE_FORMAT))
        entry = f"text-{hashlib.sha256(known.encode()).hexdigest()[:16]}"
        name = corpus.name + VALIDATION * on_validation
        return Source(name, entry, lambda: _encode(corpus, load(), on_validation, validation), corpus.notice)

    name, notice, columns = shared_columns(dataset, find, on_main)
    train, test = columns["train"], columns["test"]
    blocks = max(0, len(train) - 1) // block_size
    if blocks < batch_size or min(len(test), len(columns.get("validation", test))) < 2:
        raise UserError(
            f"dataset={dataset!r}: {name} has {blocks} training blocks of {block_size} tokens, but a batch has "
            f"{batch_size}. Use more text, shorter blocks, or a smaller batch_size."
        )
    return TextData(
        name,
        TensorTable(tokens=train.unfold(0, block_size + 1, block_size)[: blocks // batch_size * batch_size]),
        _filled_up(test, block_size),
        load(),
        columns["test_bytes"].item() / max(1, int((test >= 0).sum())),
        notice,
        _filled_up(columns["validation"], block_size) if validation else None,
    )


def _filled_up(ids: Tensor, block_size: int) -> TensorTable:
    filled = math.ceil((len(ids) - 1) / block_size) * block_size + 1
    padded = torch.nn.functional.pad(ids.int(), (0, filled - len(ids)), value=IGNORED)
    return TensorTable(tokens=padded.unfold(0, block_size + 1, block_size))


# --- sources of text -----------------------------------------------------------------------------------------------


def _choose(dataset: str, data_dir: str | Path | None, rows: Callable[..., _Corpus]) -> _Corpus:
    """Find a text; `rows` reads data sets of rows, given the name of the text and the arguments of `load_splits`."""
    folder = None if data_dir is None else Path(data_dir).expanduser()
    if dataset in (STDLIB, REFERENCE):
        return _of_python(dataset)
    if dataset in (SHAKESPEARE, PROSE, "auto"):
        try:
            place = data_folder(folder)
            for path in (place / SHAKESPEARE / "input.txt", place / "input.txt"):
                if path.is_file():
                    return _files(SHAKESPEARE, [path])
            reason = f"{place} holds no {SHAKESPEARE}/input.txt"
        except NotFoundHere as nowhere:
            reason = str(nowhere)
        if dataset == SHAKESPEARE:
            raise UserError(f"dataset={SHAKESPEARE!r}: {reason}. Give data_dir with {SHAKESPEARE}/input.txt.")
        if folder is None:
            return _of_python(REFERENCE if dataset == PROSE else STDLIB, "tinyshakespeare is not here: taking the ")
        dataset = FOLDER
    if dataset == FOLDER:
        if folder is None:
            raise UserError(f"dataset={FOLDER!r}: data_dir is missing. Give the folder there.")
        return _folder(folder, "data_dir", rows)
    path = Path(dataset).expanduser()
    if path.is_dir() and not any(file.suffix in ROWS for file in path.rglob("*")):
        return _folder(path, "dataset", rows)
    if path.is_file() and path.suffix not in ROWS:
        return _files(path.name, [path], f"{path.name}: {_how_split(1)}")
    if path.exists():
        return rows(path.name, str(path))
    if "/" in dataset:
        return rows(dataset, *dataset.split(":", 1))
    names = ", ".join(("auto", SHAKESPEARE, STDLIB, REFERENCE, FOLDER))
    raise UserError(
        f"dataset={dataset!r}: is no dataset. Choose one of {names}, a file, a folder, or owner/name of the Hub."
    )


def _files(name: str, files: Sequence[Path], notice: str | None = None) -> _Corpus:
    return _Corpus(name, content_key(files), {"train": lambda: [path.read_bytes() for path in files]}, notice)


def _of_python(dataset: str, instead: str | None = None) -> _Corpus:
    """Return the top-level modules of the standard library, 4.7 MB in Python 3.11, or the language reference printed by
    `help("assert")`, 0.5 MB of English. `instead` begins the notice."""
    from pydoc_data import topics

    python = f"of Python {sys.version_info.major}.{sys.version_info.minor}"
    if dataset == STDLIB:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        notice = instead and f"{instead}sources of Python's standard library."
        return _files(f"standard library {python}", files, notice)
    key = content_key([Path(topics.__file__)])
    splits = {"train": lambda: [text.encode() for _, text in sorted(topics.topics.items())]}
    return _Corpus(f"language reference {python}", key, splits, instead and f"{instead}language reference of Python.")


def _folder(folder: Path, argument: str, rows: Callable[..., _Corpus]) -> _Corpus:
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    if files:
        return _files(folder.name, files, f"{folder.name}: {_how_split(len(files))}")
    if any(path.suffix in ROWS for path in folder.rglob("*")):
        return rows(folder.name, str(folder))
    raise UserError(
        f"{argument}={str(folder)!r}: has no text ({', '.join(sorted(SUFFIXES))}), *.parquet or "
        "*.jsonl files. Give another folder."
    )


def _rows(load: Callable[[], Tokenizer], answers: bool, name: str, dataset: str, config: str | None = None) -> _Corpus:
    """Return the rows of a Hub data set, file or folder. `load` gives the tokenizer, which writes conversations."""
    splits, key = load_splits(dataset, config)
    train = splits["train"] if "train" in splits else next(iter(splits.values()))
    talks = MESSAGES in train.column_names or set(PAIR) <= set(train.column_names)
    wanted = f"text, {MESSAGES} or {' and '.join(PAIR)}"
    column = None if talks else find_column(dataset, train, wanted, ("text",), ("string", "large_string"))

    def documents(rows: Any) -> list[Document]:
        if column is not None:
            return [text.encode() for text in rows[column] if text]
        what = f"dataset={dataset!r}"
        return [
            write_conversation(load(), _messages_of(row), what, answers=answers) for row in progress(rows, "tokenizing")
        ]

    held_out = {part: splits[part] for part in ("test", "validation") if part in splits and splits[part] is not train}
    notice = None
    if not held_out:
        notice = f"{name}: {_how_split(len(train) if column is None else sum(map(bool, train[column])))}"
    readers = {part: partial(documents, rows) for part, rows in {"train": train, **held_out}.items()}
    return _Corpus(name, key, readers, notice, talks)


def _messages_of(row: Mapping[str, Any]) -> Any:
    """Return the messages of a row; a text prompt and completion become a user and an assistant message."""
    if MESSAGES in row:
        return row[MESSAGES]
    prompt, completion = (row[name] for name in PAIR)
    if isinstance(prompt, list) and isinstance(completion, list):
        return prompt + completion
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]


# --- from documents to ids -------------------------------------------------------------------------------------------


def split(documents: Sequence[D]) -> tuple[list[D], list[D]]:
    """Split into training and held-out documents: every tenth, or the last tenth of each if there are few."""
    if len(documents) >= MANY:
        return [text for i, text in enumerate(documents) if i % MANY != MANY - 1], list(documents[MANY - 1 :: MANY])
    cuts = [_character_boundary(text, len(text) * 9 // 10) for text in documents]
    both: list[Any] = list(zip(documents, cuts, strict=True))
    return [text[:cut] for text, cut in both], [text[cut:] for text, cut in both]


def _how_split(documents: int) -> str:
    """Describe the rule of `split` to the user."""
    part = "every tenth of its" if documents >= MANY else "the last tenth of each of its"
    return f"it has no test split: {part} {documents:,} document(s) is held out."


def _character_boundary(text: Document, at: int) -> int:
    """Return the first position from `at` on that is not inside a UTF-8 character."""
    while isinstance(text, bytes) and at < len(text) and text[at] & 0xC0 == 0x80:
        at += 1
    return at


def _encode(corpus: _Corpus, tokenizer: Tokenizer, on_validation: bool, validation: bool) -> dict[str, np.ndarray]:
    """Return the ids of each part as columns, and the number of bytes that the held-out ids stand for as `test_bytes`.

    Args:
        corpus: Text to read.
        tokenizer: Tokenizer that encodes the documents.
        on_validation: Replace the held-out part by a part of the training text.
        validation: Also hold out a part of the training text, as "validation".
    """
    splits, parts = corpus.splits, {"train": corpus.splits["train"]()}
    if held_out := splits.get("test", splits.get("validation")):
        parts["test"] = held_out()
    else:
        parts["train"], parts["test"] = split(parts["train"])
    if on_validation or validation:
        chosen_on = "test" if on_validation else "validation"
        if {"test", "validation"} <= splits.keys():
            parts[chosen_on] = splits["validation"]()
        else:
            parts["train"], parts[chosen_on] = split(parts["train"])
    # A separator is a byte of the text, too: it has to be predicted like any other.
    said = b"\0".join(text for text in parts["test"] if isinstance(text, bytes))
    said += b"".join(
        tokenizer.decode(ids[ids >= 0].tolist()).encode() for ids in parts["test"] if not isinstance(ids, bytes)
    )
    columns = {part: _joined(documents, tokenizer) for part, documents in parts.items()}
    return {**columns, "test_bytes": np.array([len(said)], dtype=np.int64)}


def _joined(documents: Sequence[Document], tokenizer: Tokenizer) -> np.ndarray:
    """Concatenate all ids, with separators between documents; the loss of conversations excludes separators."""
    pieces: list[np.ndarray] = []
    for document in progress(documents, "tokenizing"):
        if isinstance(document, bytes):
            ids, separator = tokenizer.encode(document), tokenizer.separator
        else:
            ids, separator = document, ~tokenizer.separator
        if len(ids):
            pieces += [np.array([separator], dtype=ids.dtype), ids]
    return np.concatenate(pieces[1:]) if pieces else np.zeros(0, dtype=np.int32)
