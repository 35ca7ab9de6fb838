"""Errors that users see, and exit codes."""

import difflib
import errno
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from operator import index
from pathlib import Path
from typing import Any, get_args

EXIT_DONE = 0
EXIT_BUG = 1
EXIT_USER_ERROR = 2
EXIT_PREEMPTED = 75
"""EX_TEMPFAIL of sysexits.h: run the same command again, it continues from a verified checkpoint."""
EXIT_SMALLER_BATCHES = 76
"""Of a rank, to the process that started it: a step ran out of memory, start all again with smaller micro-batches."""
EXIT_INTERRUPTED = 130
"""Ctrl-C."""
OUT_OF_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "Cannot allocate memory",
    "MemoryError",  # of another rank: `toolkit.experts.parallel.collectives.together`
    "std::bad_alloc",
    "out of memory",  # CUDA's own, where an operation and not the allocator asked for it
    "CUBLAS_STATUS_ALLOC_FAILED",
    "Failed to CUDA calloc",  # NCCL
    "Failed to CUDA malloc",
)
"""Of which a RuntimeError speaks where there was no memory."""
MOST_QUOTED = 200
"""Characters of a library's message that one of ours quotes."""


class UserError(ValueError):
    """Bad input: one sentence that names the field, the value and the remedy.

    Raised alike on every rank (use `Run.on_main_and_share` for what only one rank can know), so that all of them
    leave with `EXIT_USER_ERROR`, nobody waits for a rank that is gone, and one line is printed. The message names an
    argument as Python writes it, `ep_size=3`; the command line says `--ep-size 3`.

    Args:
        message: The whole sentence. Without one it is made of the other three.
        field: The argument or field that is wrong.
        value: What it was.
        remedy: What to do instead, without a full stop.
    """

    def __init__(self, message: str = "", *, field: str | None = None, value: Any = None, remedy: str | None = None):
        super().__init__(message or f"{field}={repr(value) if isinstance(value, str) else value}: {remedy}.")
        self.field, self.value, self.remedy = field, value, remedy


def require(holds: bool, field: str, value: object, remedy: str) -> None:
    """Raise UserError with the field, its value and the remedy, unless `holds`."""
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


def did_you_mean(word: str, names: Collection[str], otherwise: str) -> str:
    """Return "did you mean NAME?" with the one of `names` closest to `word`, which may lack its group; else
    `otherwise`."""
    aliases = {name.rpartition(".")[2].lstrip("-"): name for name in names} | {name.lstrip("-"): name for name in names}
    found = difflib.get_close_matches(word.lstrip("-").lower(), aliases, n=1)
    return f"did you mean {aliases[found[0]]}?" if found else otherwise


class Preempted(BaseException):
    """The run was asked to stop, and left a verified checkpoint if it was training: `EXIT_PREEMPTED`.

    No Exception, because a signal handler raises it anywhere: in an import, or in a `try` around reading a file. `code`
    is the exit code: `EXIT_INTERRUPTED` after Ctrl-C.
    """

    def __init__(self, message: str, code: int = EXIT_PREEMPTED):
        super().__init__(message)
        self.code = code


class StepOutOfMemory(MemoryError):
    """A step ran out of memory, and the run in `folder` takes smaller micro-batches when it is started again."""

    def __init__(self, message: str, folder: Path):
        super().__init__(message)
        self.folder = folder


@contextmanager
def reading(path: str | os.PathLike[str], remedy: str) -> Iterator[None]:
    """Raise UserError that names `path` instead of any error of a library that reads it, but for a lack of memory."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        cause = error.__cause__ or error
        raise UserError(f"{path}: cannot be read ({type(cause).__name__}: {one_line(cause)}). {remedy}") from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether Python, the system, torch's CPU allocator or a GPU found no memory."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's is a RuntimeError
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY)


def system_error(error: BaseException) -> str | None:
    """The file and the reason of an error of the file system, as a sentence, or None for other errors."""
    if not isinstance(error, OSError) or isinstance(error, ConnectionError) or not error.strerror:
        return None
    return f"{': '.join(os.fsdecode(part) for part in (error.filename, error.strerror) if part)}."


def one_line(error: BaseException) -> str:
    """The message of `error`, without a full stop, for a sentence that quotes it: its words in one line, at most
    `MOST_QUOTED` characters, because libraries put lists and whole traces into theirs. The error's type where it has no
    message."""
    return " ".join(str(error).split())[:MOST_QUOTED].rstrip(". ") or type(error).__name__
