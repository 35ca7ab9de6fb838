"""Text in packed blocks: documents from a folder, the Hub or Python's own sources, encoded once."""

from __future__ import annotations

import hashlib
import math
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from toolkit.data.cache import REMEDY, OnMain, cached_columns
from toolkit.data.files import NotFoundHere, content_key, data_folder
from toolkit.data.images import VALIDATION
from toolkit.data.rows import load_splits
from toolkit.data.table import TensorTable
from toolkit.data.tokenizer import MESSAGES, Tokenizer, load_tokenizer, write_conversation
from toolkit.errors import UserError, reading

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
CACHE_FORMAT = 2
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
    """Text source chosen by the main process."""

    name: str
    kind: Literal["files", "topics", "dataset"]
    """For "topics": the texts of a dict in a single file, which is a module."""
    source: tuple[str, ...]
    """File paths, or the arguments of `datasets.load_dataset`."""
    notice: str | None = None
    validation: bool = False
    """Whether to split the training documents again and ignore the held-out ones."""
    answers: bool = False
    """Whether the loss covers only the assistant's tokens of conversations."""

    def columns(self, tokenizer: Tokenizer) -> tuple[dict[str, Tensor], str | None]:
        """Ids "train" and "test", and "test_bytes": how many bytes the latter stand for; and how rows were split that
        do not say it."""
        if self.kind == "dataset":
            train, test, key, said = _read_dataset(tokenizer, self.validation, self.answers, *self.source)
            return cached_columns(self._entry(key, tokenizer), lambda: _encode(train, test, tokenizer)), said
        if self.answers:
            raise _no_conversations(self.name)

        def encode() -> dict[str, np.ndarray]:
            train, test = split(self._documents())
            return _encode(*(split(train) if self.validation else (train, test)), tokenizer)

        return cached_columns(self._entry(content_key(map(Path, self.source)), tokenizer), encode), None

    def _entry(self, key: str, tokenizer: Tokenizer) -> str:
        parts = "-validation" * self.validation + "-answers" * self.answers
        return f"text-{key}-{tokenizer.key}{parts}-v{CACHE_FORMAT}"

    def _documents(self) -> list[bytes]:
        if self.kind == "topics":
            from pydoc_data.topics import topics

            return [text.encode() for _, text in sorted(topics.items())]
        return [Path(path).read_bytes() for path in self.source]


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
    validation = validation and not dataset.endswith(VALIDATION)
    columns: dict[str, Tensor] = {}
    found: list[Tokenizer] = []

    def read(corpus: _Corpus, tokenizer: Tokenizer) -> str | None:
        found, said = corpus.columns(tokenizer)
        columns.update(found)
        if validation:
            held_out, _ = replace(corpus, validation=True).columns(tokenizer)
            columns.update(train=held_out["train"], validation=held_out["test"])
        return said and f"{corpus.name}: {said}"

    @reading(f"dataset={dataset!r}", REMEDY)
    def decide() -> _Corpus:
        corpus = replace(_choose(dataset.removesuffix(VALIDATION), data_dir), answers=assistant_only_loss)
        if dataset.endswith(VALIDATION):
            corpus = replace(corpus, name=corpus.name + VALIDATION, validation=True)
        found.append(load_tokenizer(tokenizer))
        corpus = replace(corpus, notice=read(corpus, found[0]) or corpus.notice)
        blocks = (len(columns["train"]) - 1) // block_size
        if blocks < batch_size or len(columns["test"]) < 2 or (validation and len(columns["validation"]) < 2):
            raise UserError(
                f"dataset={dataset!r}: {corpus.name} has {max(blocks, 0)} training blocks of {block_size} tokens, but "
                f"a batch has {batch_size}. Use more text, shorter blocks, or a smaller batch_size."
            )
        return corpus

    corpus: _Corpus = on_main(decide)
    here = found[0] if found else load_tokenizer(tokenizer)
    if not columns:
        read(corpus, here)
    train = columns["train"]
    blocks = (len(train) - 1) // block_size // batch_size * batch_size
    return TextData(
        corpus.name,
        TensorTable(tokens=train.unfold(0, block_size + 1, block_size)[:blocks]),
        _filled_up(columns["test"], block_size),
        here,
        columns["test_bytes"].item() / max(1, int((columns["test"] >= 0).sum())),
        corpus.notice,
        _filled_up(columns["validation"], block_size) if validation else None,
    )


def _filled_up(ids: Tensor, block_size: int) -> TensorTable:
    filled = math.ceil((len(ids) - 1) / block_size) * block_size + 1
    padded = torch.nn.functional.pad(ids.int(), (0, filled - len(ids)), value=IGNORED)
    return TensorTable(tokens=padded.unfold(0, block_size + 1, block_size))


# --- sources of text -----------------------------------------------------------------------------------------------


def _choose(dataset: str, data_dir: str | Path | None) -> _Corpus:
    folder = None if data_dir is None else Path(data_dir).expanduser()
    if dataset == STDLIB:
        return _stdlib()
    if dataset == REFERENCE:
        return _reference()
    if dataset in (SHAKESPEARE, PROSE, "auto"):
        try:
            place = data_folder(folder)
            for path in (place / SHAKESPEARE / "input.txt", place / "input.txt"):
                if path.is_file():
                    return _Corpus(SHAKESPEARE, "files", (str(path),))
            reason = f"{place} holds no {SHAKESPEARE}/input.txt"
        except NotFoundHere as nowhere:
            reason = str(nowhere)
        if dataset == SHAKESPEARE:
            raise UserError(f"dataset={SHAKESPEARE!r}: {reason}. Give data_dir with {SHAKESPEARE}/input.txt.")
        if folder:
            return _folder(folder)
        return _reference(_NO_SHAKESPEARE) if dataset == PROSE else _stdlib(_NO_SHAKESPEARE)
    if dataset == FOLDER:
        if folder is None:
            raise UserError(f"dataset={FOLDER!r}: data_dir is missing. Give the folder there.")
        return _folder(folder)
    path = Path(dataset).expanduser()
    if path.is_dir() and not any(file.suffix in ROWS for file in path.rglob("*")):
        return _folder(path, "dataset")
    if path.is_file() and path.suffix not in ROWS:
        return _Corpus(path.name, "files", (str(path),), f"{path.name}: {_how_split(1)}")
    if path.exists():
        return _Corpus(path.name, "dataset", (str(path),))
    if "/" in dataset:
        return _Corpus(dataset, "dataset", tuple(dataset.split(":", 1)))
    names = ", ".join(("auto", SHAKESPEARE, STDLIB, REFERENCE, FOLDER))
    raise UserError(
        f"dataset={dataset!r}: is no dataset. Choose one of {names}, a file, a folder, or owner/name of the Hub."
    )


_NO_SHAKESPEARE = "tinyshakespeare is not here: taking the "


def _stdlib(notice: str | None = None) -> _Corpus:
    """Return the top-level modules of the standard library: 4.7 MB in Python 3.11."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return _of_python("standard library", "files", files, notice and f"{notice}sources of Python's standard library.")


def _reference(notice: str | None = None) -> _Corpus:
    """Return the language reference printed by `help("assert")`: 0.5 MB of English in Python 3.11."""
    from pydoc_data import topics

    files = [Path(topics.__file__)]
    return _of_python("language reference", "topics", files, notice and f"{notice}language reference of Python.")


def _of_python(what: str, kind: Literal["files", "topics"], files: Sequence[Path], notice: str | None) -> _Corpus:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return _Corpus(f"{what} of Python {version}", kind, tuple(map(str, files)), notice)


def _folder(folder: Path, argument: str = "data_dir") -> _Corpus:
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    if files:
        return _Corpus(folder.name, "files", tuple(map(str, files)), f"{folder.name}: {_how_split(len(files))}")
    if any(path.suffix in ROWS for path in folder.rglob("*")):
        return _Corpus(folder.name, "dataset", (str(folder),))
    raise UserError(
        f"{argument}={str(folder)!r}: has no text ({', '.join(sorted(SUFFIXES))}), *.parquet or "
        "*.jsonl files. Give another folder."
    )


def _read_dataset(
    tokenizer: Tokenizer, validation: bool, answers: bool, name: str, config: str | None = None
) -> tuple[Sequence[Document], Sequence[Document], str, str | None]:
    """Return the training and held-out documents of a Hub data set, file or folder, their content key, and how they
    were split if the data set has no held-out split."""
    splits, key = load_splits(name, config)
    train = splits["train"] if "train" in splits else next(iter(splits.values()))
    talks = MESSAGES in train.column_names or set(PAIR) <= set(train.column_names)
    column = None if talks else _text_column(name, train)
    if answers and not talks:
        raise _no_conversations(name)

    def documents(rows: Any) -> list[Document]:
        if column is None:
            what = f"dataset={name!r}"
            return [write_conversation(tokenizer, row, what, answers=answers) for row in _conversations(rows)]
        return [text.encode() for text in rows[column] if text]

    if talks:
        key = hashlib.sha256(f"{key}{tokenizer.chat}".encode()).hexdigest()[:16]
    held_out = [splits[part] for part in ("test", "validation") if part in splits and splits[part] is not train]
    if validation and len(held_out) == 2:
        return documents(train), documents(held_out[1]), key, None
    texts = documents(train)
    parts = (texts, documents(held_out[0])) if held_out else split(texts)
    said = None if held_out else _how_split(len(texts))
    return *(split(parts[0]) if validation else parts), key, said


def _conversations(rows: Any) -> Iterable[Any]:
    """Return the messages of each row; a text prompt and completion become a user and an assistant message."""
    if MESSAGES in rows.column_names:
        return rows[MESSAGES]
    return (_joined_turns(*pair) for pair in zip(*(rows[name] for name in PAIR), strict=True))


def _joined_turns(prompt: Any, completion: Any) -> Any:
    if isinstance(prompt, list) and isinstance(completion, list):
        return prompt + completion
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]


def _no_conversations(name: str) -> UserError:
    remedy = f"{name} has no conversations, in {MESSAGES} or {' and '.join(PAIR)}: leave it out"
    return UserError(field="assistant_only_loss", value=True, remedy=remedy)


def _text_column(name: str, rows: Any) -> str:
    strings = [key for key, kind in rows.features.items() if getattr(kind, "dtype", None) in ("string", "large_string")]
    if "text" in strings or len(strings) == 1:
        return "text" if "text" in strings else strings[0]
    raise UserError(
        f"dataset={name!r}: has no column named text, {MESSAGES} or {' and '.join(PAIR)}, but "
        f"{', '.join(rows.column_names)}. Rename one."
    )


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


def _encode(train: Sequence[Document], test: Sequence[Document], tokenizer: Tokenizer) -> dict[str, np.ndarray]:
    texts = [text for text in test if isinstance(text, bytes)]
    # A separator is a byte of the text, too: it has to be predicted like any other.
    test_bytes = sum(map(len, texts)) + max(0, len(texts) - 1)
    for ids in test:
        if not isinstance(ids, bytes):
            test_bytes += len(tokenizer.decode(ids[ids >= 0].tolist()).encode())
    return {
        "train": _joined(train, tokenizer),
        "test": _joined(test, tokenizer),
        "test_bytes": np.array([test_bytes], dtype=np.int64),
    }


def _joined(documents: Sequence[Document], tokenizer: Tokenizer) -> np.ndarray:
    """Concatenate all ids, with separators between documents; the loss of conversations excludes separators."""
    pieces: list[np.ndarray] = []
    for document in documents:
        if isinstance(document, bytes):
            ids, separator = tokenizer.encode(document), tokenizer.separator
        else:
            ids, separator = document, ~tokenizer.separator
        if len(ids):
            pieces += [np.array([separator], dtype=ids.dtype), ids]
    return np.concatenate(pieces[1:]) if pieces else np.zeros(0, dtype=np.int32)
