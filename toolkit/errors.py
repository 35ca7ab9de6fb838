"""Errors that users see, and exit codes."""

import difflib
import errno
import os
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from operator import index
from pathlib import Path
from typing import Any, get_args

EXIT_DONE = 0
EXIT_BUG = 1
EXIT_USER_ERROR = 2
EXIT_PREEMPTED = 75
"""EX_TEMPFAIL of sysexits.h: the same command continues from a verified checkpoint."""
EXIT_SMALLER_BATCHES = 76
"""Exit code of a rank for its launcher: a step ran out of memory, restart all ranks with smaller micro-batches."""
EXIT_INTERRUPTED = 130
"""Ctrl-C."""
OUT_OF_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "Cannot allocate memory",
    "MemoryError",  # on another rank: `toolkit.experts.parallel.collectives.together`
    "std::bad_alloc",
    "out of memory",  # CUDA, outside torch's allocator
    "CUBLAS_STATUS_ALLOC_FAILED",
    "Failed to CUDA calloc",  # NCCL
    "Failed to CUDA malloc",
)
"""Substrings of out-of-memory RuntimeError messages."""
MOST_QUOTED = 200
"""Maximum characters quoted from a library's message."""


class UserError(ValueError):
    """Bad input: one sentence that names the field, the value and the remedy.

    Raise it on every rank (with `Run.on_main_and_share` if only one rank can detect the error), so that all ranks exit
    with `EXIT_USER_ERROR` without hanging, and one line is printed. The message uses Python syntax, `ep_size=3`.

    Args:
        message: The full sentence. Default: built from the other arguments.
        field: The wrong argument or field.
        value: Its value.
        remedy: The remedy, without a full stop.
    """

    def __init__(self, message: str = "", *, field: str | None = None, value: Any = None, remedy: str | None = None):
        message = message or f"{field}={repr(value) if isinstance(value, str) else value}: {remedy}."
        super().__init__(printable(message))
        self.field, self.value, self.remedy = field, value, remedy


def require(holds: bool, field: str, value: object, remedy: str) -> None:
    """Raise UserError with the field, its value and the remedy unless `holds`."""
    if not holds:
        raise UserError(field=field, value=value, remedy=remedy)


def require_choice(name: str, value: object, choices: Any) -> None:
    """Raise UserError with the argument, its value and the choices, unless `value` is one of the Literal `choices`."""
    if value not in get_args(choices):
        raise UserError(field=name, value=value, remedy=f"take one of {', '.join(map(str, get_args(choices)))}")


def require_count(name: str, value: object, least: int = 1) -> None:
    """Raise UserError with the argument and its value, unless `value` is an integer of `least` or more."""
    if not hasattr(value, "__index__") or index(value) < least:
        raise UserError(field=name, value=value, remedy=f"take an integer of {least} or more")


def require_type(name: str, value: object, kind: Any, remedy: str) -> None:
    """Raise UserError with the argument, the type of its value and the remedy, unless `value` is an object of `kind`.

    `kind` is a type or a union, as for `isinstance`. Classes never pass, as `isinstance` accepts them for protocols.
    """
    if isinstance(value, type) or not isinstance(value, kind):
        found = (
            f"the class {value.__name__}, not an object"
            if isinstance(value, type)
            else f"of type {type(value).__name__}"
        )
        raise UserError(f"{name}: is {'None' if value is None else found}. {remedy}.")


def did_you_mean(word: str, names: Collection[str], otherwise: str) -> str:
    """Return "Did you mean NAME?" for the name closest to `word`, with or without its group; else `otherwise`."""
    aliases = {name.rpartition(".")[2].lstrip("-"): name for name in names} | {name.lstrip("-"): name for name in names}
    aliases |= {f"no_{name}": name for name in names}
    # Below 0.8, two thirds of the names for words of other libraries are wrong.
    found = difflib.get_close_matches(word.lstrip("-").lower(), aliases, n=1, cutoff=0.8)
    return f"Did you mean {aliases[found[0]]}?" if found else otherwise


class Preempted(BaseException):
    """A request to stop the run, raised after saving a verified checkpoint if the run was training.

    A BaseException, because signal handlers raise it anywhere: in an import, or in a `try` around reading a file.
    `code` is the exit code: `EXIT_INTERRUPTED` after Ctrl-C.
    """

    def __init__(self, message: str, code: int = EXIT_PREEMPTED):
        super().__init__(message)
        self.code = code


class StepOutOfMemory(MemoryError):
    """Out of memory in a step: the run in `folder` uses smaller micro-batches after a restart."""

    def __init__(self, message: str, folder: Path):
        super().__init__(message)
        self.folder = folder


@contextmanager
def reading(path: str | os.PathLike[str], remedy: str) -> Iterator[None]:
    """Convert library errors while reading `path` to UserError, except out-of-memory errors."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        cause = error.__cause__ or error
        raise UserError(f"{path}: cannot be read ({type(cause).__name__}: {one_line(cause)}). {remedy}") from error


def printable(text: str) -> str:
    """Return `text` for a terminal: control characters of file names are escaped, and URIs lose their credentials."""
    text = re.sub(r"(?<=://)[^/@\s]+@", "", text)
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]", lambda found: ascii(found[0])[1:-1], text)


def last_line(log: Path) -> str:
    """Return the last line of `log` that names an error, or its last line, without "error: "."""
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(error: |[\w.]*(Error|Exception)\b)", line)]
    return (errors or lines or ["no output"])[-1].removeprefix("error: ").strip()


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether Python, the system, torch or a GPU ran out of memory."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's is a RuntimeError
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY)


def system_error(error: BaseException) -> str | None:
    """Return the file and the reason of a file system error as a sentence; None for other errors."""
    if not isinstance(error, OSError) or isinstance(error, ConnectionError) or not error.strerror:
        return None
    return printable(f"{': '.join(os.fsdecode(part) for part in (error.filename, error.strerror) if part)}.")


def one_line(error: BaseException) -> str:
    """Return the message of `error` on one line for quoting: at most `MOST_QUOTED` characters, without a full stop.

    Returns the type of `error` if the message is empty."""
    return " ".join(str(error).split())[:MOST_QUOTED].rstrip(". ") or type(error).__name__
