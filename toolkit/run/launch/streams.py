"""Standard input, output and error that are closed, that nobody reads, or whose encoding lacks a character."""

from __future__ import annotations

import contextlib
import io
import os
import sys


def prepare_streams() -> None:
    """Has to be called first: whatever is printed is written, in whatever encoding, and where a program was started
    with a closed stream the null device takes its place, and not the next file that is opened."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # which gets the lowest free number, this one
        if getattr(sys, name) is None:  # its number may be that of a file which was opened since
            setattr(sys, name, open(os.devnull, "w" if number else "r"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        # Not what a notebook or a test has put there, and not where the file behind it was exchanged since.
        if isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(OSError):
                stream.reconfigure(errors="backslashreplace")


def print_nowhere() -> None:
    """Send what is printed from now on, and what Python still holds back of it, to the null device: writing to a pipe
    that nobody reads would fail once more when Python ends."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
